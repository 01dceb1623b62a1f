"""A step of DASO behind slow links is as fast as a mean inside the nodes only."""

import offbeat
from bench.harness import Bench, Claim, Result, at_least, at_most, command, numbers
from bench.harness.step_times import Timed, step_times
from offbeat.methods import Mean

WAITS = {2: 3, 4: 2}  # by nodes: so many steps last as long as the sum
DDP, FLOOR = "torch DDP", "mean in the node only"
HEADINGS = ("nodes", "method", "a step", "x torch DDP", "floor / time", "waiting", "sum in flight")
BENCH = Bench(name="daso/speed", minutes=5, full_minutes=12)


def cycling(every: int, wait: int) -> Timed:
    """Whole cycles are timed, after a first one; steps of a cycle differ by a third."""
    algorithm = offbeat.daso(every=every, wait=wait)
    return Timed(f"cycling, B = {every}, W = {wait}", algorithm, 5 * every, every)


@command(
    BENCH, "--nodes 2 --full", full={"rounds": 5}, nodes="Of the lab: 2, 4.",
    steps="Optimizer steps of a whole run.",
)  # fmt: skip
def app(nodes: str = "2,4", rate: str = "250mbit", steps: int = 20, rounds: int = 2) -> Result:
    """Time DASO on a GPT, two processes per node, beside torch's DDP and a hierarchical mean."""
    rows, claims, measured = [], [], {}
    for count in numbers(nodes):
        wait = WAITS[count]
        cycle, run = cycling(8, wait), offbeat.daso(every=8, wait=wait, total_steps=steps)
        whole = Timed(f"whole run, {steps} steps", run, steps, 0)
        turns = [
            Timed(DDP, offbeat.torch_ddp(), 4, 1),
            Timed("hierarchical mean", offbeat.local_sgd(every=1, within="local"), 4, 1),
            Timed("compute only", offbeat.alone(), 6),
            Timed(FLOOR, offbeat.Algorithm(Mean(over="local")), 34),
            cycle,
            cycling(4, 1),
        ]
        turns = [*turns * rounds, Timed("ddp()", offbeat.ddp(), 4, 1), whole]
        found = measured[count] = step_times(turns, count, 2, rate)
        for name, pace in found.items():
            ratios = [f"{found[other].step / pace.step:.2f}" for other in (DDP, FLOOR)]
            waiting = "" if name == DDP else f"{pace.stalled:.3f} s"
            flight = f"{pace.in_flight:.2f} s" if pace.in_flight else ""
            rows.append((f"{count}", name, f"{pace.step:.3f} s", *ratios, waiting, flight))
        pace = found[cycle.name]
        # The steps of DDP are all alike, so that a few tell what a whole run takes.
        faster = steps * found[DDP].step / found[whole.name].whole
        text = f"{count} nodes of 2:"
        claims += [
            at_least(f"{text} cycling is as fast as a mean in the node (B = 8, W = {wait})",
                     found[FLOOR].step / pace.step, 0.95, "{:.2f}"),
            at_most(f"{text} the sum is in flight while W steps are computed", pace.in_flight,
                    wait * pace.step, "{:.2f} s"),
            Claim(f"{text} a whole run is faster than torch DDP", "1.34 - 1.54 x; goal 2 x",
                  f"{faster:.2f} x", faster >= 2),
        ]  # fmt: skip
    title = f"A step of a GPT, two processes per node, {rate}"
    return Result(title, HEADINGS, rows, claims, measured)
