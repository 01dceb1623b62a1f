"""Nodes that exchange train as far as one worker: word vectors on two nodes.

`examples/skipgram.py` with one and two workers per node, alone and with push-sum between nodes:
held-out loss over seconds.
"""

import json
import os
import sys
from dataclasses import dataclass

from bench.harness import Bench, Claim, Result, command, console, files, ranks

SCRIPT = str(files.EXAMPLES / "skipgram.py")
RATE = "250mbit"
CASES = ((1, 1, "alone()"), (1, 2, "alone()"), (2, 1, "sgp()"), (2, 2, "sgp()"), (2, 2, "alone()"))
HEADINGS = ("nodes x workers", "between nodes", "steps/s of a node", "held-out loss", "s in all")
BENCH = Bench(name="async_adam/lab", minutes=2)


@dataclass(frozen=True)
class Outcome:
    """What the first worker of the first node measured: seconds and held-out loss."""

    pace: float  # steps per second of the node's workers together
    curve: list[tuple[float, float]]

    @property
    def last(self) -> float:
        return self.curve[-1][1]

    def seconds_to(self, loss: float) -> float:
        """When the loss was first reached; infinite if it never was."""
        return min((s for s, found in self.curve if found <= loss), default=float("inf"))


def run(nodes: int, workers: int, algorithm: str, steps: int) -> Outcome:
    """One training, with one process per node that starts the node's workers."""
    command = [sys.executable, SCRIPT, "--workers", f"{workers}", "--algorithm", algorithm,
               "--steps", f"{steps}", "--exchange-every", "100"]  # fmt: skip
    with ranks.nodes(nodes, 1, RATE) as runner:
        printed = ranks.run(runner, command, show=False)
    last = json.loads(next(line for line in reversed(printed) if line.startswith("{")))
    found = Outcome(last["steps_per_second"], last["curve"])
    console.print(f"{nodes} x {workers} {algorithm}: {found.pace:.0f} steps/s a node", style="dim")
    return found


@command(BENCH, "--steps 8000", steps="Steps of a node's workers together.")
def app(steps: int = 3000) -> Result:
    found = [run(*case, steps) for case in CASES]
    one, two, pair, four, apart = found
    common = max(one.last, two.last)
    seconds = one.seconds_to(common), two.seconds_to(common)
    claims = [
        Claim("2 nodes x 2 workers train as far as 1 worker in as many steps of a node",
              f"{one.last:.3f}, + 5 % at most", f"{four.last:.3f}", four.last <= 1.05 * one.last),
        Claim(f"2 workers of a node reach loss {common:.3f} before 1 does", f"{seconds[0]:.1f} s",
              f"{seconds[1]:.1f} s", seconds[1] < seconds[0]),
        Claim("2 nodes that exchange end lower than 2 that do not", f"{apart.last:.3f}",
              f"{four.last:.3f}", four.last < apart.last),
        Claim("an exchange costs 1 worker per node no speed", f"{one.pace:.0f} steps/s",
              f"{pair.pace:.0f} steps/s", pair.pace >= 0.95 * one.pace),
    ]  # fmt: skip
    rows = [
        (f"{nodes} x {workers}", algorithm, f"{each.pace:.0f}", f"{each.last:.4f}",
         f"{each.curve[-1][0]:.1f}")
        for (nodes, workers, algorithm), each in zip(CASES, found, strict=True)
    ]  # fmt: skip
    title = f"Skip-gram, {steps} steps a node, {RATE}, {os.cpu_count()} cores for all workers"
    return Result(title, HEADINGS, rows, claims, raw=found)
