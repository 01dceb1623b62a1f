"""The bench of kills: which steps count, and where the rest of the time went."""

import json
from pathlib import Path
from typing import Any

import pytest


def written(path: Path, *events: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in events), "utf-8")
    return path


def steps(first: int, *times: tuple[float, float]) -> list[list[Any]]:
    lines = [[["begin", a, n], ["end", b, n]] for n, (a, b) in enumerate(times, first)]
    return [event for pair in lines for event in pair]


def test_steps_of_a_killed_worker_count_as_the_survivors_say(tmp_path: Path) -> None:
    from bench.elastic.score import Life, score

    survivor = written(
        tmp_path / "a", ["ready", 0.0], ["in", 0.0], *steps(0, (0, 1), (1, 2), (2, 3)),
        ["begin", 3.0, 3], ["span", 5.0, "agree_on_survivors", 0.5], ["lost", 5.0, 1, 2],
        ["end", 5.0, 3], ["begin", 5.0, 4], ["span", 6.2, "admit", 0.2], ["end", 6.2, 4],
    )  # fmt: skip
    victim = written(
        tmp_path / "b", ["ready", 0.0], ["in", 0.0], *steps(0, (0, 1), (1, 2), (2, 3)),
    )  # fmt: skip
    back = written(
        tmp_path / "c", ["ready", 4.5], ["span", 6.1, "pass_barrier", 1.4], ["in", 6.2],
        *steps(5, (6.2, 7.2)),
    )  # fmt: skip
    lives = [
        Life.read(survivor, 0, 7.2, is_killed=False),
        Life.read(victim, 1, 3.5, is_killed=True),
        Life.read(back, 1, 7.2, is_killed=False),
    ]
    found = score(lives, pause=1.0, begin=0.0, end=7.2)
    assert found.living == pytest.approx(7.2 + 3.5 + 2.7)
    assert (found.useful, found.lost) == (5 + 2 + 1, 1)  # the victim's last was in no exchange
    assert found.gap == pytest.approx(2.0)
    assert found.back == pytest.approx([1.7])
    expected = {
        "uncommitted": 1.0, "unfinished": 0.5, "agreement": 0.5, "detection": 0.5,
        "admission": 0.2, "waiting": 1.4, "healing": 0.3, "other": 1.0,
    }  # fmt: skip
    assert found.parts == pytest.approx(expected, abs=1e-9)


def test_steps_that_torchft_discards_do_not_count(tmp_path: Path) -> None:
    from bench.elastic.score import Life, score

    log = written(
        tmp_path / "a", ["ready", 0.0], ["in", 0.0], *steps(0, (0, 1), (1, 2)), ["commit", 2.0],
        *steps(2, (2, 3), (3, 4)), ["drop", 4.0], *steps(4, (4, 5)),
    )  # fmt: skip
    killed = score([Life.read(log, 0, 5.5, is_killed=True)], pause=1.0, begin=0.0, end=6.0)
    assert (killed.useful, killed.lost) == (2.0, 3)
    living = score([Life.read(log, 0, 5.5, is_killed=False)], pause=1.0, begin=0.0, end=6.0)
    assert (living.useful, living.lost, living.gap) == (3.0, 2, 3.0)
