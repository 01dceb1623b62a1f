"""The benches of outer optimizers: figures from turns, rounds that resume, and verdicts."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench.harness.training import Times
from bench.outer.rounds import Rounds
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("results")
Paces = Callable[[str], tuple[float, float]]  # seconds and bytes of a step


def course(step: float, sent: float = 0.0, turns: int = 4, loss: float = 3.0) -> Any:
    """A lead of 15 slower steps, then equal turns; the loss falls by 0.1 in each."""
    steps = [15] + [8] * turns
    seconds = [30 * step] + [8 * step] * turns
    losses = [loss - 0.1 * turn for turn in range(turns + 1)]
    return Times(steps, seconds, [0.5] * len(steps), [sent * count for count in steps], losses)


def test_the_lead_counts_for_losses_but_not_for_the_time_of_a_step() -> None:
    found = {"a": course(2.0, 5.0), "b": course(1.0, turns=6)}
    rounds = Rounds([found], seconds=84.0)
    assert rounds.step("a") == 2.0
    assert rounds.bytes("a") == 5.0
    assert rounds.ratio("a", "b") == 2.0
    # 60 s for the lead, 16 s for each turn: one turn and a half.
    assert rounds.steps("a") == 15 + 12
    assert rounds.loss_in_time("a") == pytest.approx(3.0 - 0.15)
    assert rounds.common_steps == 15 + 4 * 8
    assert rounds.loss_in_steps("b") == pytest.approx(3.0 - 0.4)


def test_ratios_compare_the_same_turns_whatever_the_load() -> None:
    slow, fast = course(2.0), course(1.0, turns=7)
    for one in (slow, fast):  # other load doubles the third turn, and later ones of the fast one
        one.seconds[3] *= 2
    fast.seconds[5:] = [80.0] * 3
    assert Rounds([{"slow": slow, "fast": fast}], 10.0).ratio("slow", "fast") == 2.0


def test_figures_are_medians_over_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.outer import rounds

    runs = []

    def times(training: Any, nodes: int, rate: str) -> Any:
        runs.append(training)
        return {name: course(float(len(runs))) for name in training.methods}

    monkeypatch.setattr(rounds, "times", times)

    assert rounds.race(("a",), 10.0, 4, "250mbit", 2).step("a") == 1.5


def judged(
    name: str, pace: Paces, monkeypatch: pytest.MonkeyPatch, folder: Path, *, found: bool = True
) -> tuple[dict[str, Any], dict[str, bool]]:
    """The result of a bench whose methods take the given time, and which claims hold."""
    module = importlib.import_module(f"bench.outer.{name}")
    if hasattr(module, "find_spec"):
        monkeypatch.setattr(module, "find_spec", lambda package: object() if found else None)

    def race(methods: tuple[str, ...], seconds: float, *more: Any) -> Rounds:
        courses = {}
        for method in methods:
            step, sent = pace(method)
            courses[method] = course(step, sent, loss=3.0 + step)
        return Rounds([courses], seconds)

    monkeypatch.setattr(module, "race", race)
    done = CliRunner().invoke(module.app, [])
    assert done.exit_code == 0, done.output + str(done.exception)
    result = json.loads((folder / f"outer/{name}.json").read_text("utf-8"))
    return result, {claim["text"]: claim["holds"] for claim in result["claims"]}


def test_verdicts_on_all_methods_follow_from_the_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def good(method: str) -> tuple[float, float]:
        sent = 1.5e5 if "sparse" in method else 2.5e6 if "int8" in method else 1e7
        return (2.0 if method == "ddp" else 1.0), sent

    result, held = judged("methods", good, monkeypatch, tmp_path)
    assert all(held.values())
    assert [row[0] for row in result["rows"]][-1] == "alone"

    def bad(method: str) -> tuple[float, float]:
        return (1.0 if method in ("ddp", "alone") else 2.0), 1e7

    _, held = judged("methods", bad, monkeypatch, tmp_path)
    assert not any(holds for text, holds in held.items() if "equal steps" not in text)


def test_verdicts_beside_torchft_follow_from_the_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def slower(method: str) -> tuple[float, float]:
        return (1.04 if method.startswith("torchft") else 1.0), 1e7

    result, held = judged("torchft", slower, monkeypatch, tmp_path)
    assert all(held.values())
    assert [row[3] for row in result["rows"] if row[0] == "torchft DDP"] == ["1.04"]
    _, held = judged("torchft", lambda m: (slower(m)[0] ** -2, 1e7), monkeypatch, tmp_path)
    assert not any(holds for text, holds in held.items() if "no slower" in text)


def test_without_torchft_its_rows_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, held = judged("torchft", lambda m: (1.0, 1e7), monkeypatch, tmp_path, found=False)
    assert not any("torchft" in row[0] for row in result["rows"])
    assert list(held) == ["streaming DiLoCo takes as long as computing alone"]


@pytest.mark.parametrize("extra", [0.0, 0.5])
def test_memory_beyond_the_docstring_is_found(
    extra: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory: ModuleType = importlib.import_module("bench.outer.memory")

    def on_nodes(work: Any, question: Any, nodes: int, procs: int = 1) -> Any:
        recipes, shards = question
        n = nodes if shards > 1 else nodes * procs
        held = {name: 3 + memory.SAID[name][1](n) for name in recipes}
        held["sgp"] += extra
        found = {name: memory.Memory(models, models + 1) for name, models in held.items()}
        return found | ({"lags(density=0.01)": None} if shards > 1 else {})

    monkeypatch.setattr(memory, "on_nodes", on_nodes)
    done = CliRunner().invoke(memory.app, [])
    assert done.exit_code == 0, done.output + str(done.exception)
    result = json.loads((tmp_path / "outer/memory.json").read_text("utf-8"))
    assert [claim["holds"] for claim in result["claims"]] == [extra == 0] * 2
    cells = {row[0]: row[2:] for row in result["rows"]}
    assert cells["diloco(every=2)"] == ["3.00", "3.00", "3.00", "3.00"]
    assert cells["lags(density=0.01)"][2:] == ["refused", ""]
