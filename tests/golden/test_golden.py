"""Runs recorded by earlier code: what it saved still loads, continues alike and costs the same."""

from typing import Any

import pytest
import torch

from golden.record import Run, cases, key, recorded, run
from recipe_cases import CASES, Case, of_each_recipe

# One unit in the last place: processors differ in fused multiplications.
# Bytes of a gather to every other rank. finish() gathers once where it gathered twice, and once
# more where it averages models: its sums carry their weights, 12 bytes each (the tolerance).
FEWER = 80
CLOSE: dict[str, dict[str, float]] = {
    "float64": {"rtol": 0.0, "atol": 4e-16},
    "bfloat16": {"rtol": 0.0, "atol": 2**-7},
}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Run]]:
    return recorded()


@pytest.mark.parametrize(("case", "dtype"), cases(), ids=lambda part: getattr(part, "text", part))
def test_recorded_checkpoints_continue(case: Case, dtype: str, runs: dict[str, list[Run]]) -> None:
    earlier = runs[key(case, dtype)]
    for ours, theirs in zip(run(case, dtype, earlier), earlier, strict=True):
        _require_equal(ours.saved, theirs.saved)
        torch.testing.assert_close(ours.parameters, theirs.parameters, **CLOSE[dtype])


@pytest.mark.parametrize(
    "case", of_each_recipe(c for c in CASES if c.reference), ids=lambda case: case.text
)
def test_recorded_runs_cost_the_same(case: Case, runs: dict[str, list[Run]]) -> None:
    earlier = runs[key(case, "float64")]
    for ours, theirs in zip(run(case, "float64"), earlier, strict=True):
        torch.testing.assert_close(ours.parameters, theirs.parameters, **CLOSE["float64"])
        gathers = (theirs.bytes_sent - ours.bytes_sent) / FEWER / (len(earlier) - 1)
        assert 0.9 < gathers < 2


def _require_equal(ours: Any, theirs: Any) -> None:
    """Compare nested dicts bit for bit."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        # Push-sum had one setting more, which the text of the algorithm and its checksum show.
        is_older = "on_failure" in str(theirs.get("algorithm"))
        for name in theirs.keys() - ({"algorithm", "checksum"} if is_older else set()):
            _require_equal(ours[name], theirs[name])
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert type(ours) is type(theirs)
        assert ours == theirs
