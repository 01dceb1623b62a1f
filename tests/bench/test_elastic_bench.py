"""The bench of kills: which steps count, and where the rest of the time went."""

import json
from pathlib import Path
from typing import Any

import pytest


def written(path: Path, *events: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in events), "utf-8")
    return path


def steps(first: int, *ends: float) -> list[list[Any]]:
    return [["end", end, number, "other"] for number, end in enumerate(ends, first)]


def test_steps_of_a_killed_worker_count_as_the_survivors_say(tmp_path: Path) -> None:
    from bench.elastic.score import Life, recordings, score

    survivor = written(
        tmp_path / "0.a", ["ready", 0.0], ["in", 0.0], *steps(0, 1, 2, 3),
        ["end", 5.0, 3, "detection"], ["lost", 5.0, 1, 2], ["end", 6.2, 4, "joining"],
        ["stopped", 7.2],
    )  # fmt: skip
    spans = [[], [], [], [["agreement", 1.5, 1.9], ["stall", 1.0, 1.9]]]
    recorded = recordings(tmp_path / "0.a")
    recorded.mkdir(parents=True)
    written(
        recorded / "rank0.jsonl",
        {"event": "attached", "rank": 0, "nodes": [[0], [1]], "exchanges": "", "algorithm": ""},
        *({"event": "step", "time": 0.0, "seconds": 1.0, "bytes_sent": 0, "seconds_stalled": 0.0}
          | {"spans": each} for each in spans),
    )  # fmt: skip
    victim = written(
        tmp_path / "1.b", ["ready", 0.0], ["in", 0.0], *steps(0, 1, 2, 3),
        ["killed", 3.5],
    )  # fmt: skip
    back = written(
        tmp_path / "1.c", ["ready", 4.5], ["in", 6.2], *steps(5, 7.2), ["stopped", 7.2],
    )  # fmt: skip
    lives = [Life.read(path) for path in (survivor, victim, back)]
    found = score(lives, pause=1.0, begin=0.0, end=7.2)
    assert found.living == pytest.approx(7.2 + 3.5 + 2.7)
    assert (found.useful, found.lost) == (5 + 2 + 1, 1)  # the victim's last was in no exchange
    assert found.gap == pytest.approx(2.0)
    assert found.back == pytest.approx([1.7])
    expected = {
        "not in an exchange": 1.5,
        "detection": 0.6,
        "agreement": 0.4,
        "joining": 0.2 + 1.7,
        "other": 1.0,
    }
    assert {k: v for k, v in found.parts.items() if v} == pytest.approx(expected, abs=1e-9)


def test_steps_that_torchft_discards_do_not_count(tmp_path: Path) -> None:
    from bench.elastic.score import Life, score

    events = (
        ["ready", 0.0], ["in", 0.0], *steps(0, 1, 2), ["commit", 2.0],
        *steps(2, 3, 4), ["drop", 4.0], *steps(4, 5),
    )  # fmt: skip
    killed, living = (
        score([Life.read(written(tmp_path / f"0.{how}", *events, [how, 5.5]))], 1.0, 0.0, 6.0)
        for how in ("killed", "stopped")
    )
    assert (killed.useful, killed.lost) == (2.0, 3)
    assert (living.useful, living.lost, living.gap) == (3.0, 2, 3.0)
