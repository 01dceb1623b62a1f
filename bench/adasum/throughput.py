"""Training throughput with Adasum, beside all-reduce (Table 3 of the paper).

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
BENCH = Bench(
    name="adasum/throughput",
    claim="At most 13 % of throughput is lost (Table 3)",
    minutes=3,
    full_minutes=10,
    evidence={"Table 3": "At most 13 % of throughput is lost beside an all-reduce"},
)


def rows(nodes: int, found: Found) -> Iterator[tuple[str, ...]]:
    for method, each in found.items():
        samples, share = nodes * BATCH / each.step, found[REDUCE].step / each.step
        yield f"{nodes}", method, f"{each.step:.3f} s", f"{samples:.1f}", f"{share:.2f}"


def claims(nodes: int, found: Found) -> list[Claim]:
    seconds = {method: each.step for method, each in found.items()}
    reduce = seconds[REDUCE] - seconds[ALONE]
    over = (seconds[FP32] - seconds[ALONE]) / reduce
    lost = seconds[FP32] / seconds[REDUCE] - 1
    return [
        Claim(f"{nodes} nodes: Adasum costs throughput beside an all-reduce after backward",
              "2 % to 13 %", f"{lost:.0%}", lost <= 0.13),
        Claim(f"{nodes} nodes: a step is computation and 1.05 x an all-reduce",
              "at most 1.05 x", f"{over:.2f} x", over <= 1.05, GOAL),
        Claim(f"{nodes} nodes: with 16-bit messages faster than ddp, which overlaps",
              "faster", f"{seconds[BF16]:.3f} s against {seconds[DDP]:.3f} s",
              seconds[BF16] < seconds[DDP], GOAL),
    ]  # fmt: skip


@command(BENCH, "--nodes 4", full="Four times the rounds.", nodes="Numbers of emulated nodes.")
def app(full: bool = False, nodes: str = "2,4,8", rate: str = "250mbit") -> Result:
    """Time whole training steps of a GPT behind slow links."""
    found = {}
    for count in numbers(nodes):
        rounds = (4 if count < 8 else 2) * (4 if full else 1)
        found[count] = times(Training(gpt, METHODS, steps=2, rounds=rounds), count, rate)
    return Result.by_case(f"A step of a GPT, {rate}", HEADINGS, found, rows, claims)
