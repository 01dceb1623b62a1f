"""A step of overlap SGP and the CPU time it needs, beside the package decent-dp.

Both train the GPT of 3.2 million parameters in the same loop with the same optimizer, in turns on
the same emulated nodes.
"""

import json
import sys
from importlib.util import find_spec
from statistics import fmean
from typing import Annotated

import typer

from bench.harness.bench import Bench
from bench.harness.claim import GOAL, Claim
from bench.harness.console import console
from bench.harness.effect import Effect
from bench.harness.ranks import nodes as emulated
from bench.harness.ranks import run
from bench.harness.report import report

OURS, THEIRS = "sgp(overlap=1)", "decent-dp"
RATE = "250mbit"
BENCH = Bench(
    name="sgp/decent_dp",
    claim="Overlap SGP is no slower than decent-dp",
    minutes=7,
    full_minutes=20,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Turns = dict[str, list[dict[str, float]]]  # by method: seconds of a step, and of a core


def measure(nodes: int, steps: int, rounds: int) -> Turns:
    """All turns of both methods, which take turns to be the first."""
    found: Turns = {OURS: [], THEIRS: []}
    with emulated(nodes, 1, RATE) as runner:
        for index in range(rounds):
            for method in sorted(found, reverse=index % 2 == 1):
                command = [sys.executable, "-m", "bench.sgp.gpt_loop", method, str(steps)]
                spent = json.loads(run(runner, command, show=False)[-1])
                found[method].append(spent)
                console.print(
                    f"{nodes} nodes, {index + 1}/{rounds}, {method}: {spent['step']:.3f} s a step, "
                    f"{spent['core'] * 1e3:.0f} ms of a core"
                )
    return found


def ratio(found: Turns, kind: str) -> Effect:
    """Ours as a multiple of theirs, over the rounds."""
    pairs = zip(found[OURS], found[THEIRS], strict=True)
    return Effect.mean([ours[kind] / theirs[kind] for ours, theirs in pairs], "x")


def claims(nodes: int, found: Turns) -> list[Claim]:
    made = []
    for kind, text in (("step", "a step takes"), ("core", "a rank needs CPU time,")):
        ours = ratio(found, kind)
        words = f"{nodes} nodes: {text} no more than with decent-dp"
        made.append(Claim(words, "at most 1.00 x", str(ours), ours.size <= 1.0, GOAL))
    return made


def row(nodes: int, method: str, turns: list[dict[str, float]]) -> tuple[str, ...]:
    """The means over the rounds."""
    step, core = (fmean(turn[kind] for turn in turns) for kind in ("step", "core"))
    return f"{nodes}", method, f"{step:.3f} s", f"{core * 1e3:.0f} ms"


@app.command(epilog=BENCH.examples("--nodes 8", "--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Ten rounds.")] = False,
    nodes: Annotated[str, typer.Option(help="Numbers of emulated nodes.")] = "4,8",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 25,
    rounds: Annotated[int, typer.Option(min=2, help="Turns of each method.")] = 4,
) -> None:
    """Time overlap SGP and decent-dp in turns."""
    if find_spec("decent_dp") is None:
        raise SystemExit("decent-dp is not installed: pip install '.[bench]'")
    found = {int(n): measure(int(n), steps, 10 if full else rounds) for n in nodes.split(",")}
    rows = [row(n, method, turns) for n, each in found.items() for method, turns in each.items()]
    judged = [claim for n, each in found.items() for claim in claims(n, each)]
    headings = ("nodes", "method", "a step", "CPU time of a rank")
    report(BENCH, f"Beside decent-dp, {RATE}", headings, rows, judged, measured=found)


if __name__ == "__main__":
    app()
