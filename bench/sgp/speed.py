"""Overlap SGP steps as fast behind slow links as the slower of computing and the link."""

from bench.harness import Bench, Claim, Result, at_most, command, numbers
from bench.harness.comparison import beside_torch, rows, seconds

FP32, BF16 = "sgp(overlap=1)", "sgp(overlap=1,wire='bf16')"
ALGORITHMS = f"ddp,local_sgd(every=8),sgp,{FP32},{BF16}"
NEAR = 0.30 / 0.243  # s per step of a prototype with 16-bit messages and with none, 4 nodes
HEADINGS = ("nodes", "method", "a step", "x torch DDP", "floor / time", "sent a step")
BENCH = Bench(name="sgp/speed", minutes=5, full_minutes=25)


@command(BENCH, "--nodes 4 --steps 40", full={"steps": 40, "rounds": 3})
def app(nodes: str = "4,8", rate: str = "250mbit", steps: int = 12, rounds: int = 1) -> Result:
    """Time SGP on a GPT behind slow links, beside torch's DDP."""
    lines, claims = [], []
    for count in numbers(nodes):
        found = beside_torch(ALGORITHMS, count, rate, steps, rounds)
        lines += [(f"{count}", *row) for row in rows(found)]
        by_name = {result.name: result for result in found.results}
        share = by_name[FP32].share_of_floor
        over = 1 / share.median if share else float("nan")
        text = f"{count} nodes: overlap takes as long as the slower of computation and link"
        claims.append(at_most(text, over, 1.03))
        bf16, alone = seconds(by_name[BF16]), seconds(by_name["alone"])
        text = f"{count} nodes: with 16-bit messages a step is near computation"
        paper = f"at most {NEAR:.2f} x (0.30 s against 0.243 s)"
        ours = f"{bf16 / alone:.2f} x ({bf16:.3f} s against {alone:.3f} s)"
        claims.append(Claim(text, paper, ours, bf16 <= NEAR * alone))
    return Result(f"A step of a GPT, {rate}", HEADINGS, lines, claims)
