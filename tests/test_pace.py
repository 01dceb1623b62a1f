"""Where the time of a backward goes, by layer, by a clock of our own."""

from collections.abc import Iterator

import pytest
import torch

from offbeat.gradients.pace import Pace


def test_the_time_of_a_message_is_shared_out_among_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock: Iterator[float] = iter([0.0, 1.0, 4.0, 6.0, 14.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr(Pace, "_now", lambda pace: next(clock))
    pace = Pace(torch.device("cpu"))
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
