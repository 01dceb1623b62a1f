"""Nodes that exchange train as far as one worker: word vectors on two nodes.

`examples/skipgram.py` with one and two workers per node, alone and with push-sum between nodes:
held-out loss over seconds.
"""

import json
import os
import sys
from math import inf

from bench.harness import Bench, Claim, Result, command, files, ranks

SCRIPT = str(files.EXAMPLES / "skipgram.py")
RATE = "250mbit"
CASES = ((1, 1, "alone()"), (1, 2, "alone()"), (2, 1, "sgp()"), (2, 2, "sgp()"), (2, 2, "alone()"))
HEADINGS = ("nodes x workers", "between nodes", "steps/s of a node", "held-out loss", "s in all")
BENCH = Bench(name="async_adam/lab", minutes=2)


Curve = list[tuple[float, float]]  # seconds, and held-out loss


def run(nodes: int, workers: int, algorithm: str, steps: int) -> tuple[float, Curve]:
    """Steps per second of a node, and what its first worker measured."""
    command = [sys.executable, SCRIPT, "--workers", f"{workers}", "--algorithm", algorithm,
               "--steps", f"{steps}", "--exchange-every", "100"]  # fmt: skip
    with ranks.nodes(nodes, 1, RATE) as runner:
        printed = ranks.run(runner, command, show=False)
    last = json.loads(next(line for line in reversed(printed) if line.startswith("{")))
    return last["steps_per_second"], last["curve"]


def seconds_to(loss: float, curve: Curve) -> float:
    """When the loss was first reached; infinite if it never was."""
    return min((seconds for seconds, found in curve if found <= loss), default=inf)


@command(BENCH, "--steps 8000", steps="Steps of a node's workers together.")
def app(steps: int = 3000) -> Result:
    found = [run(*case, steps) for case in CASES]
    paces, curves = zip(*found, strict=True)
    one, two, _, four, apart = lasts = [curve[-1][1] for curve in curves]
    common = max(one, two)
    seconds = [seconds_to(common, curve) for curve in curves[:2]]
    claims = [
        Claim("2 nodes x 2 workers train as far as 1 worker in as many steps of a node",
              f"{one:.3f}, + 5 % at most", f"{four:.3f}", four <= 1.05 * one),
        Claim(f"2 workers of a node reach loss {common:.3f} before 1 does", f"{seconds[0]:.1f} s",
              f"{seconds[1]:.1f} s", seconds[1] < seconds[0]),
        Claim("2 nodes that exchange end lower than 2 that do not", f"{apart:.3f}",
              f"{four:.3f}", four < apart),
        Claim("an exchange costs 1 worker per node no speed", f"{paces[0]:.0f} steps/s",
              f"{paces[2]:.0f} steps/s", paces[2] >= 0.95 * paces[0]),
    ]  # fmt: skip
    rows = [
        (f"{nodes} x {workers}", algorithm, f"{pace:.0f}", f"{last:.4f}", f"{curve[-1][0]:.1f}")
        for (nodes, workers, algorithm), pace, last, curve in zip(
            CASES, paces, lasts, curves, strict=True
        )
    ]
    title = f"Skip-gram, {steps} steps a node, {RATE}, {os.cpu_count()} cores for all workers"
    return Result(title, HEADINGS, rows, claims)
