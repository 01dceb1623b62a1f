"""At most 13 % of throughput is lost beside an all-reduce.

A GPT of 3.2 million parameters with SGD, one process per node; methods run in turns. An update
exists only after backward, so nothing of Adasum overlaps; its goal is computation plus 1.05 times
an all-reduce that does not overlap either, which is `local_sgd(every=1)`.
"""

from collections.abc import Iterator

from bench.harness import GOAL, Bench, Claim, Result, command, numbers
from bench.harness.attached import ALONE
from bench.harness.gpt import BATCH, gpt
from bench.harness.training import Found, Training, times

REDUCE, DDP, FP32, BF16 = "local_sgd(every=1)", "ddp", "adasum", "adasum(wire='bf16')"
METHODS = (ALONE, REDUCE, DDP, FP32, BF16)
HEADINGS = ("nodes", "method", "a step", "samples/s", "x all-reduce")
BENCH = Bench(name="adasum/throughput", minutes=3, full_minutes=10, evidence="Table 3")


def rows(nodes: int, found: Found) -> Iterator[tuple[str, ...]]:
    for method, each in found.items():
        samples, share = nodes * BATCH / each.step, found[REDUCE].step / each.step
        yield f"{nodes}", method, f"{each.step:.3f} s", f"{samples:.1f}", f"{share:.2f}"


def claims(nodes: int, found: Found) -> list[Claim]:
    alone, reduce, ddp, fp32, bf16 = (found[method].step for method in METHODS)
    over, lost = (fp32 - alone) / (reduce - alone), fp32 / reduce - 1
    return [
        Claim(f"{nodes} nodes: Adasum costs throughput beside an all-reduce after backward",
              "2 % to 13 %", f"{lost:.0%}", lost <= 0.13),
        Claim(f"{nodes} nodes: a step is computation and 1.05 x an all-reduce",
              "at most 1.05 x", f"{over:.2f} x", over <= 1.05, GOAL),
        Claim(f"{nodes} nodes: with 16-bit messages faster than ddp, which overlaps",
              "faster", f"{bf16:.3f} s against {ddp:.3f} s", bf16 < ddp, GOAL),
    ]  # fmt: skip


@command(BENCH, "--nodes 4", full={"rounds": 16}, rounds="Of turns; half of them with 8 nodes.")
def app(nodes: str = "2,4,8", rate: str = "250mbit", rounds: int = 4) -> Result:
    found = {
        count: times(Training(gpt, METHODS, 2, rounds if count < 8 else rounds // 2), count, rate)
        for count in numbers(nodes)
    }
    return Result.by_case(f"A step of a GPT, {rate}", HEADINGS, found, rows, claims)
