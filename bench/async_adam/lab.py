"""Asynchronous Adam inside nodes with an exchange between them: word vectors on two nodes.

`examples/skipgram.py` with one and two workers per node, alone and with push-sum between nodes:
held-out loss over seconds.
"""

import json
import os
import sys
from dataclasses import dataclass

from bench.harness import Bench, Claim, Result, command, console, files, ranks

SCRIPT = files.EXAMPLES / "skipgram.py"
RATE = "250mbit"
CASES = ((1, 1, "alone()"), (1, 2, "alone()"), (2, 1, "sgp()"), (2, 2, "sgp()"), (2, 2, "alone()"))
HEADINGS = ("nodes x workers", "between nodes", "steps/s of a node", "held-out loss", "s in all")
BENCH = Bench(
    name="async_adam/lab", claim="Nodes that exchange train as far as one worker", minutes=2
)


@dataclass(frozen=True)
class Outcome:
    """What the first worker of the first node measured: seconds and held-out loss."""

    nodes: int
    workers: int
    algorithm: str
    pace: float  # steps per second of the node's workers together
    curve: list[tuple[float, float]]

    @property
    def label(self) -> str:
        """Short, for tables and pictures."""
        return f"{self.nodes} x {self.workers}"

    def seconds_to(self, loss: float) -> float:
        """When the loss was first reached; infinite if it never was."""
        return min((s for s, found in self.curve if found <= loss), default=float("inf"))


def run(nodes: int, workers: int, algorithm: str, steps: int) -> Outcome:
    """One training, with one process per node that starts the node's workers."""
    options = {"workers": workers, "algorithm": algorithm, "steps": steps, "exchange-every": 100}
    command = [sys.executable, str(SCRIPT)]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with ranks.nodes(nodes, 1, RATE) as runner:
        printed = ranks.run(runner, command, show=False)
    last = json.loads(next(line for line in reversed(printed) if line.startswith("{")))
    found = Outcome(nodes, workers, algorithm, last["steps_per_second"], last["curve"])
    console.print(f"{found.label} {algorithm}: {found.pace:.0f} steps/s a node", style="dim")
    return found


def claims(found: list[Outcome]) -> list[Claim]:
    one, two, pair, four, apart = found
    common = max(one.curve[-1][1], two.curve[-1][1])
    seconds = one.seconds_to(common), two.seconds_to(common)
    last = {"one": one.curve[-1][1], "four": four.curve[-1][1], "apart": apart.curve[-1][1]}
    return [
        Claim("2 nodes x 2 workers train as far as 1 worker in as many steps of a node",
              f"{last['one']:.3f}, + 5 % at most", f"{last['four']:.3f}",
              last["four"] <= 1.05 * last["one"]),
        Claim(f"2 workers of a node reach loss {common:.3f} before 1 does", f"{seconds[0]:.1f} s",
              f"{seconds[1]:.1f} s", seconds[1] < seconds[0]),
        Claim("2 nodes that exchange end lower than 2 that do not", f"{last['apart']:.3f}",
              f"{last['four']:.3f}", last["four"] < last["apart"]),
        Claim("an exchange costs 1 worker per node no speed", f"{one.pace:.0f} steps/s",
              f"{pair.pace:.0f} steps/s", pair.pace >= 0.95 * one.pace),
    ]  # fmt: skip


@command(BENCH, "--steps 8000", steps="Steps of a node's workers together.")
def app(steps: int = 3000) -> Result:
    """Train word vectors on one and two nodes, with one and two workers each."""
    found = [run(*case, steps) for case in CASES]
    rows = [
        (o.label, o.algorithm, f"{o.pace:.0f}", f"{o.curve[-1][1]:.4f}", f"{o.curve[-1][0]:.1f}")
        for o in found
    ]
    title = f"Skip-gram, {steps} steps a node, {RATE}, {os.cpu_count()} cores for all workers"
    return Result(title, HEADINGS, rows, claims(found), raw=found)
