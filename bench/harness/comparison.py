"""Comparing methods on one script with :mod:`offbeat.compare`."""

import os
import tempfile
from pathlib import Path

from bench.harness.environment import environment
from bench.harness.files import EXAMPLES, console
from offbeat.compare import Comparison, Experiment, Result, Session, open_runner, parse_methods
from offbeat.compare.result import Spread
from offbeat.kit.quantity import size

SCRIPT = EXAMPLES / "char_gpt.py"
GPT = ("--width", "256", "--depth", "4", "--context", "128", "--batch-size", "3")  # 13 MB


def compare(experiment: Experiment, nodes: int, rate: str, procs: int = 1) -> Comparison:
    """Run all methods of the plan in turns.

    Raises RuntimeError with the last lines of a method that failed.
    """
    os.environ.update(environment())
    with tempfile.TemporaryDirectory() as name:
        session = Session(experiment, Path(name), console)
        with open_runner(nodes, procs, rate) as (runner, unshaped):
            session.run(runner, unshaped)
        comparison = session.write(report=False)
    assert comparison is not None, "all methods have run"
    if failed := [result for result in comparison.results if result.state != "done"]:
        raise RuntimeError("\n".join(failed[0].last_lines))
    return comparison


def beside_torch(
    algorithms: str, nodes: int, rate: str, steps: int, rounds: int, procs: int = 1
) -> Comparison:
    """Methods that train a GPT of 3.2 million parameters, torch's DDP and no communication."""
    methods, baseline = parse_methods(algorithms, baseline="torch-ddp", compute_only=True)
    arguments = (*GPT, "--report-every", str(steps), "--windows", "8")
    experiment = Experiment(SCRIPT, methods, baseline, arguments, steps, rounds)
    return compare(experiment, nodes, rate, procs)


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Name, time of a step, speed beside the baseline, share of the floor, and bytes."""
    baseline = next(seconds(result) for result in comparison.results if result.is_baseline)
    return [
        (
            each.name, f"{seconds(each):.3f} s", f"{baseline / seconds(each):.2f}",
            f"{each.share_of_floor.median:.0%}" if each.share_of_floor else "",
            size(each.bytes_per_step.median) if each.bytes_per_step else "",
        )
        for each in comparison.results
    ]  # fmt: skip


def middle(spread: Spread | None) -> float:
    """The median, or NaN where nothing was measured."""
    return spread.median if spread else float("nan")


def seconds(result: Result) -> float:
    """The median time of a step."""
    return middle(result.seconds_per_step)
