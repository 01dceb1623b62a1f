"""Seconds per step of SGP behind slow links, beside torch's DDP.

A GPT of 3.2 million parameters, one process per node. The floor of a method is a step without
communication or its bytes on the link, whichever takes longer.
"""

from bench.harness import Bench, Claim, Result, command, numbers
from bench.harness.comparison import beside_torch, figures, rows, seconds
from offbeat.compare import Comparison

FP32, BF16 = "sgp(overlap=1)", "sgp(overlap=1,wire='bf16')"
ALGORITHMS = f"ddp,local_sgd(every=8),sgp,{FP32},{BF16}"
NEAR = 0.30 / 0.243  # s per step of a prototype with 16-bit messages and with none, 4 nodes
HEADINGS = ("nodes", "method", "a step", "x torch DDP", "floor / time", "sent a step")
BENCH = Bench(name="sgp/speed", claim="A step of SGP behind slow links", minutes=5, full_minutes=25)


def claims(nodes: int, comparison: Comparison) -> list[Claim]:
    results = {result.name: result for result in comparison.results}
    share = results[FP32].share_of_floor
    over = 1 / share.median if share else float("nan")
    bf16, alone = seconds(results[BF16]), seconds(results["alone"])
    return [
        Claim(f"{nodes} nodes: overlap takes as long as the slower of computation and link",
              "at most 1.03 x", f"{over:.2f} x", over <= 1.03),
        Claim(f"{nodes} nodes: with 16-bit messages a step is near computation",
              f"at most {NEAR:.2f} x (0.30 s against 0.243 s)",
              f"{bf16 / alone:.2f} x ({bf16:.3f} s against {alone:.3f} s)", bf16 <= NEAR * alone),
    ]  # fmt: skip


@command(BENCH, "--nodes 4 --steps 40", full="Three rounds, 40 steps.")
def app(full: bool = False, nodes: str = "4,8", rate: str = "250mbit", steps: int = 12) -> Result:
    """Time SGP on a GPT behind slow links, beside torch's DDP."""
    steps, rounds = (40, 3) if full else (steps, 1)
    found = {n: beside_torch(ALGORITHMS, n, rate, steps, rounds) for n in numbers(nodes)}
    lines = [(f"{count}", *row) for count, each in found.items() for row in rows(each)]
    judged = [claim for count, each in found.items() for claim in claims(count, each)]
    measured = {count: figures(each) for count, each in found.items()}
    return Result(f"A step of a GPT, {rate}", HEADINGS, lines, judged, measured=measured)
