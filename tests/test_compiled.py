"""Every recipe trains a compiled model, whose gradients come in parts, as a plain one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from problems import CURVATURES, OPTIMA, Quadratic, gradient
from recipe_cases import CASES, Case, of_each_recipe
from test_contract import check_against_the_reference


class Traced(Quadratic):
    """The same loss of tensors: for other numbers of ranks it would be compiled again."""

    def forward(self, curvature: Tensor, place: Tensor) -> Tensor:  # type: ignore[override]
        first = (curvature[:6] * (self.matrix.view(-1) - place[:6]) ** 2).sum()
        return 0.5 * (first + (curvature[6:] * (self.vector - place[6:]) ** 2).sum())


def traced() -> Traced:
    model = Traced()
    model.compile(backend="offbeat")
    return model


def loss(model: Traced, rank: int, step: int) -> Tensor:
    result: Tensor = model(torch.tensor(CURVATURES[rank]), torch.tensor(OPTIMA[rank]))
    return result


def in_parts_by_aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend "offbeat" use a compiler that takes less time than inductor."""
    from torch._dynamo import lookup_backend  # importing it takes seconds

    torch._dynamo.reset()  # what other tests have compiled counts: the ninth graph runs eagerly
    quick = lookup_backend("aot_eager")
    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda _: quick)
    monkeypatch.setattr("offbeat.exchange.engine.compiled.FIRST_BUCKET", 8)
    monkeypatch.setattr("offbeat.exchange.engine.bucket.FIRST_BUCKET", 8)


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """All models and threads run one compilation."""
    with pytest.MonkeyPatch.context() as patched:
        in_parts_by_aot_eager(patched)
        counters = torch._dynamo.utils.counters["stats"]
        before = counters["unique_graphs"]
        loss(traced(), 0, 0).backward()
        yield
        assert counters["unique_graphs"] == before + 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"options": {"epilogue_fusion": False}}, {"epilogue_fusion": False}),
        ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
    ],
    ids=["options", "mode"],
)
def test_modes_and_options_are_those_of_inductor(
    given: Any, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts_by_aot_eager(monkeypatch)
    quick, found = torch._dynamo.lookup_backend("aot_eager"), list[Any]()

    def compiler(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        found.append(config_patches)
        return quick(graph, inputs)

    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda _: compiler)
    model = Traced()
    model.compile(backend="offbeat", **given)
    loss(model, 0, 0).backward()
    assert found
    assert all(expected.items() <= patches.items() for patches in found)


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("case", of_each_recipe(CASES), ids=lambda case: case.text)
def test_follows_the_reference(case: Case) -> None:
    check_against_the_reference(case, 3, case.reference, traced, loss, gradient)
