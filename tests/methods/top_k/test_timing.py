"""Where the time of a backward goes, by layer, by a clock of our own."""

from collections.abc import Iterator

import pytest
import torch

from offbeat.functional import LinkCost
from offbeat.methods.top_k.timing import LayerTimer, LayerTimes


def test_the_time_of_a_message_is_shared_out_among_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Iterator[float] = iter([0.0, 1.0, 4.0, 6.0, 14.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(LayerTimer, "_now", lambda pace: next(clock))
    pace = LayerTimer(torch.device("cpu"))
    pace.enter("head")
    pace.added("head")  # 1 s
    pace.enter("body")
    pace.added("body")  # 2 s
    pace.launched({"head": 3, "body": 1})  # 8 s: 6 and 2
    pace.finish()
    pace.enter("head")
    pace.added("head")
    assert pace.compute == {"body": [3.0]}
    assert pace.select == {"head": [7.0, 1.0], "body": [4.0]}
    assert pace.forward == [1.0]


@pytest.mark.parametrize(
    ("per_byte", "expected"),
    [
        (1e-9, {"head": 1, "norm": 1, "body": 1, "bias": 1}),
        (1e-7, {"head": 1000, "norm": 1, "body": 300, "bias": 1000}),
    ],
)
def test_a_layer_before_a_small_one_is_sent_whole_where_all_can_be(
    per_byte: float, expected: dict[str, float]
) -> None:
    """Eq. 18 alone gives ``head`` no time but that of ``norm``, on the fastest wire too."""
    compute = {"head": 0.01, "norm": 0.0001, "body": 0.02, "bias": 0.009}
    select = {"head": 0.001, "norm": 0.0, "body": 0.001, "bias": 0.0}
    parameters = {n: torch.empty(10**6 if n in ("head", "body") else 10) for n in compute}
    times = LayerTimes(compute, select, 0.03, LinkCost(4, 0.0, per_byte))
    found = times.ratios(parameters, limit=1000, message=2**16)
    assert found == pytest.approx(expected)
