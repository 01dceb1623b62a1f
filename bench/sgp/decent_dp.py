"""A step of overlap SGP and the CPU time it needs, beside the package decent-dp.

Both train the GPT of 3.2 million parameters in the same loop with the same optimizer, in turns on
the same emulated nodes.
"""

import json
import sys
from importlib.util import find_spec
from statistics import fmean

from bench.harness import GOAL, Bench, Claim, Effect, Result, command, console, numbers
from bench.harness.ranks import nodes as emulated
from bench.harness.ranks import run
from bench.harness.turns import turn_of

OURS, THEIRS = "sgp(overlap=1)", "decent-dp"
RATE = "250mbit"
STATEMENTS = {"step": "a step takes", "core": "a rank needs CPU time,"}
HEADINGS = ("nodes", "method", "a step", "CPU time of a rank")
BENCH = Bench(
    name="sgp/decent_dp",
    claim="Overlap SGP is no slower than decent-dp",
    minutes=7,
    full_minutes=20,
)
Turns = dict[str, dict[str, list[float]]]  # by method: seconds of a step, and of a core


def measure(nodes: int, steps: int, rounds: int) -> Turns:
    """All turns of both methods, which take turns to be the first."""
    found: Turns = {method: {kind: [] for kind in STATEMENTS} for method in (OURS, THEIRS)}
    with emulated(nodes, 1, RATE) as runner:
        for index in range(rounds):
            for method in turn_of([OURS, THEIRS], index):
                command = [sys.executable, "-m", "bench.sgp.gpt_loop", method, str(steps)]
                spent = json.loads(run(runner, command, show=False)[-1])
                console.print(f"{nodes} nodes, {index + 1}/{rounds}, {method}: {spent}")
                for kind, seconds in found[method].items():
                    seconds.append(spent[kind])
    return found


def claim(nodes: int, found: Turns, kind: str) -> Claim:
    """Ours as a multiple of theirs, over the rounds."""
    ours = Effect.between(found[OURS][kind], found[THEIRS][kind], "x")
    text = f"{nodes} nodes: {STATEMENTS[kind]} no more than with decent-dp"
    return Claim(text, "at most 1.00 x", str(ours), ours.size <= 1.0, GOAL)


@command(
    BENCH, "--nodes 8", "--full", full="Ten rounds.", nodes="Numbers of emulated nodes.",
    rounds="Turns of each method.",
)  # fmt: skip
def app(full: bool = False, nodes: str = "4,8", steps: int = 25, rounds: int = 4) -> Result:
    """Time overlap SGP and decent-dp in turns."""
    if find_spec("decent_dp") is None:
        raise SystemExit("decent-dp is not installed: pip install '.[bench]'")
    found = {count: measure(count, steps, 10 if full else rounds) for count in numbers(nodes)}
    rows = [
        (f"{n}", method, f"{fmean(turns['step']):.3f} s", f"{fmean(turns['core']) * 1e3:.0f} ms")
        for n, each in found.items()
        for method, turns in each.items()
    ]
    judged = [claim(n, each, kind) for n, each in found.items() for kind in STATEMENTS]
    return Result(f"Beside decent-dp, {RATE}", HEADINGS, rows, judged, measured=found)
