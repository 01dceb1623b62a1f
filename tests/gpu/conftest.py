"""Tests on one GPU: ``make test-gpu``. They are skipped, with this reason, where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import problems

HERE = Path(__file__).parent
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: torch.cuda sees none"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder; what torch warns of on a GPU was never seen here."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(needs_gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def models_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the models of the tests on the GPU, and let no kernel of one test run into the next."""
    monkeypatch.setattr(problems, "DEVICE", "cuda")
    yield
    torch.cuda.synchronize()
