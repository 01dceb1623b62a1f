"""What the tests of the benches share."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the folder of ``bench``, which is not installed


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that results go into instead of the committed ones."""
    from bench.harness import files

    monkeypatch.setattr(files, "RESULTS", tmp_path)
    monkeypatch.setattr(files, "RAW", tmp_path / "raw")
    return tmp_path
