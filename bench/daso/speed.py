"""Seconds per step of DASO behind slow links, beside synchronous methods.

A GPT of 3.2 million parameters, two processes per node. The floor of cycling is a step whose
gradients are averaged inside the nodes only.
"""

from typing import Annotated

import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.harness.step_times import StepTime, Timed, step_times
from offbeat.methods import Mean

WAITS = {2: 3, 4: 2}  # by nodes: so many steps last as long as the sum
DDP, FLOOR, ALONE = "torch DDP", "mean in the node only", "compute only"
HEADINGS = ("nodes", "method", "a step", "x torch DDP", "floor / time", "waiting", "sum in flight")
BENCH = Bench(
    name="daso/speed",
    claim="A step of DASO behind slow links",
    minutes=5,
    full_minutes=12,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[str, list[StepTime]]


def cycling(every: int, wait: int) -> Timed:
    """Whole cycles are timed, after a first one; steps of a cycle differ by a third."""
    algorithm = offbeat.daso(every=every, wait=wait)
    return Timed(f"cycling, B = {every}, W = {wait}", algorithm, 5 * every, every)


def whole(wait: int, steps: int) -> Timed:
    algorithm = offbeat.daso(every=8, wait=wait, total_steps=steps)
    return Timed(f"whole run, {steps} steps", algorithm, steps, 0)


def measure(nodes: int, rate: str, steps: int, rounds: int) -> Found:
    """All methods in one run; those that are compared take turns."""
    turns = [
        Timed(DDP, offbeat.torch_ddp(), 4, 1),
        Timed("hierarchical mean", offbeat.local_sgd(every=1, within="local"), 4, 1),
        Timed(ALONE, offbeat.alone(), 6),
        Timed(FLOOR, offbeat.Algorithm(Mean(over="local")), 34),
        cycling(8, WAITS[nodes]),
        cycling(4, 1),
    ]
    cases = [*turns * rounds, Timed("ddp()", offbeat.ddp(), 4, 1), whole(WAITS[nodes], steps)]
    found: Found = {case.name: [] for case in cases}
    for case, pace in zip(cases, step_times(cases, nodes, 2, rate), strict=True):
        found[case.name].append(pace)
    return found


def least(found: Found, name: str, what: str = "step") -> float:
    """The least of all rounds: other load on the machine can only add time."""
    return min(getattr(pace, what) for pace in found[name])


def rows(nodes: int, found: Found) -> list[tuple[str, ...]]:
    def line(name: str) -> tuple[str, ...]:
        step, in_flight = least(found, name), least(found, name, "in_flight")
        waiting = "" if name == DDP else f"{least(found, name, 'stalled'):.3f} s"
        return (
            f"{nodes}", name, f"{step:.3f} s", f"{least(found, DDP) / step:.2f}",
            f"{least(found, FLOOR) / step:.2f}", waiting, f"{in_flight:.2f} s" if in_flight else "",
        )  # fmt: skip

    return [line(name) for name in found]


def claims(nodes: int, found: Found, steps: int) -> list[Claim]:
    wait, where = WAITS[nodes], f"{nodes} nodes of 2"
    cycle = cycling(8, wait).name
    step, in_flight = least(found, cycle), least(found, cycle, "in_flight")
    share = least(found, FLOOR) / step
    # The steps of DDP are all alike, so that a few tell what a whole run takes.
    faster = steps * least(found, DDP) / least(found, whole(wait, steps).name, "whole")
    return [
        Claim(f"{where}: cycling is as fast as a mean in the node (B = 8, W = {wait})",
              "at least 0.95", f"{share:.2f}", share >= 0.95),
        Claim(f"{where}: the sum is in flight while W steps are computed",
              f"at most {wait * step:.2f} s", f"{in_flight:.2f} s", in_flight <= wait * step),
        Claim(f"{where}: a whole run is faster than torch DDP",
              "1.34 - 1.54 x; goal 2 x", f"{faster:.2f} x", faster >= 2),
    ]  # fmt: skip


@app.command(epilog=BENCH.examples("--nodes 2 --full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Five rounds instead of two.")] = False,
    nodes: Annotated[str, typer.Option(help="Numbers of emulated nodes: 2, 4.")] = "2,4",
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of a whole run.")] = 20,
) -> None:
    """Time DASO on a GPT behind slow links, beside torch's DDP and a hierarchical mean."""
    console.print(f"two processes per node, {rate} between nodes")
    lines, judged, measured = [], [], {}
    for count in map(int, nodes.split(",")):
        found = measure(count, rate, steps, 5 if full else 2)
        lines += rows(count, found)
        judged += claims(count, found, steps)
        measured[count] = found
    title = f"A step of a GPT, two processes per node, {rate}"
    report(BENCH, title, HEADINGS, lines, judged, measured=measured)


if __name__ == "__main__":
    app()
