"""Seconds per step of DASO behind slow links, beside synchronous methods.

A GPT of 3.2 million parameters, two processes per node. The floor of cycling is a step whose
gradients are averaged inside the nodes only.
"""

from collections.abc import Iterator
from functools import partial

import offbeat
from bench.harness import Bench, Claim, Result, command, numbers
from bench.harness.step_times import StepTime, Timed, step_times
from offbeat.methods import Mean

WAITS = {2: 3, 4: 2}  # by nodes: so many steps last as long as the sum
DDP, FLOOR = "torch DDP", "mean in the node only"
HEADINGS = ("nodes", "method", "a step", "x torch DDP", "floor / time", "waiting", "sum in flight")
BENCH = Bench(
    name="daso/speed", claim="A step of DASO behind slow links", minutes=5, full_minutes=12
)
Found = dict[str, StepTime]


def cycling(every: int, wait: int) -> Timed:
    """Whole cycles are timed, after a first one; steps of a cycle differ by a third."""
    algorithm = offbeat.daso(every=every, wait=wait)
    return Timed(f"cycling, B = {every}, W = {wait}", algorithm, 5 * every, every)


def whole(wait: int, steps: int) -> Timed:
    algorithm = offbeat.daso(every=8, wait=wait, total_steps=steps)
    return Timed(f"whole run, {steps} steps", algorithm, steps, 0)


def cases(nodes: int, steps: int, rounds: int) -> list[Timed]:
    """All methods; those that are compared take turns."""
    turns = [
        Timed(DDP, offbeat.torch_ddp(), 4, 1),
        Timed("hierarchical mean", offbeat.local_sgd(every=1, within="local"), 4, 1),
        Timed("compute only", offbeat.alone(), 6),
        Timed(FLOOR, offbeat.Algorithm(Mean(over="local")), 34),
        cycling(8, WAITS[nodes]),
        cycling(4, 1),
    ]
    return [*turns * rounds, Timed("ddp()", offbeat.ddp(), 4, 1), whole(WAITS[nodes], steps)]


def rows(nodes: int, found: Found) -> Iterator[tuple[str, ...]]:
    for name, pace in found.items():
        ratios = [f"{found[other].step / pace.step:.2f}" for other in (DDP, FLOOR)]
        waiting = "" if name == DDP else f"{pace.stalled:.3f} s"
        flight = f"{pace.in_flight:.2f} s" if pace.in_flight else ""
        yield f"{nodes}", name, f"{pace.step:.3f} s", *ratios, waiting, flight


def claims(steps: int, nodes: int, found: Found) -> list[Claim]:
    wait, where = WAITS[nodes], f"{nodes} nodes of 2"
    cycle = found[cycling(8, wait).name]
    share = found[FLOOR].step / cycle.step
    # The steps of DDP are all alike, so that a few tell what a whole run takes.
    faster = steps * found[DDP].step / found[whole(wait, steps).name].whole
    return [
        Claim(f"{where}: cycling is as fast as a mean in the node (B = 8, W = {wait})",
              "at least 0.95", f"{share:.2f}", share >= 0.95),
        Claim(f"{where}: the sum is in flight while W steps are computed",
              f"at most {wait * cycle.step:.2f} s", f"{cycle.in_flight:.2f} s",
              cycle.in_flight <= wait * cycle.step),
        Claim(f"{where}: a whole run is faster than torch DDP",
              "1.34 - 1.54 x; goal 2 x", f"{faster:.2f} x", faster >= 2),
    ]  # fmt: skip


@command(
    BENCH, "--nodes 2 --full", full="Five rounds instead of two.", nodes="Of the lab: 2, 4.",
    steps="Optimizer steps of a whole run.",
)  # fmt: skip
def app(full: bool = False, nodes: str = "2,4", rate: str = "250mbit", steps: int = 20) -> Result:
    """Time DASO on a GPT behind slow links, beside torch's DDP and a hierarchical mean."""
    rounds = 5 if full else 2
    found = {n: step_times(cases(n, steps, rounds), n, 2, rate) for n in numbers(nodes)}
    title = f"A step of a GPT, two processes per node, {rate}"
    return Result.by_case(title, HEADINGS, found, rows, partial(claims, steps))
