"""Seconds per step of SGP where computation uses no CPU core, as on an accelerator.

Emulated nodes share the cores of one machine. Here computation is a pause, so that a step takes
at least the pause, and at least the time of the model's bytes on the link.
"""

from typing import Annotated

import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.pause import Paused
from bench.harness.report import report
from bench.harness.step_times import StepTime, Timed, step_times
from offbeat.kit.quantity import parse_rate
from offbeat.lab.check import PAYLOAD

FP32, BF16, ALONE = "sgp(overlap=1)", 'with wire="bf16"', "compute only"
METHODS = {
    "ddp": offbeat.ddp(),
    "sgp": offbeat.sgp(),
    FP32: offbeat.sgp(overlap=1),
    BF16: offbeat.sgp(overlap=1, wire="bf16"),
    ALONE: offbeat.alone(),
}
WIRES = {FP32: 1.0, BF16: 0.5}  # models on the link in a step
GOAL = 1.03
WIDTH = 512  # of the layers: 8.4 MB
HEADINGS = ("nodes", "method", "a step", "x ddp", "floor", "step / floor")
BENCH = Bench(
    name="sgp/accelerators",
    claim="Overlap hides communication beside accelerators",
    minutes=3,
    full_minutes=10,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[int, dict[str, StepTime]]


def floors(found: dict[str, StepTime], rate: str) -> dict[str, float]:
    """The least that a step can take: computation, or the bytes on the link with TCP headers."""
    size = sum(p.nbytes for p in Paused(0.0, WIDTH).parameters())
    wire = 8 * size / (parse_rate(rate) * PAYLOAD)
    return {name: max(found[ALONE].step, models * wire) for name, models in WIRES.items()}


def rows(found: Found, rate: str) -> list[tuple[str, ...]]:
    lines = []
    for nodes, methods in found.items():
        least = floors(methods, rate)
        for name, pace in methods.items():
            faster = f"{methods['ddp'].step / pace.step:.2f}"
            line = [f"{nodes}", name, f"{pace.step:.3f} s", faster, "", ""]
            if name in least:
                line[-2:] = f"{least[name]:.3f} s", f"{pace.step / least[name]:.2f}"
            lines.append(tuple(line))
    return lines


def claims(found: Found, rate: str) -> list[Claim]:
    made = []
    for nodes, methods in found.items():
        for name, floor in floors(methods, rate).items():
            over = methods[name].step / floor
            text = f"{nodes} nodes: {name} takes as long as the slower of computation and link"
            made.append(Claim(text, f"at most {GOAL} x", f"{over:.2f} x", over <= GOAL))
    return made


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Four times the steps.")] = False,
    nodes: Annotated[str, typer.Option(help="Numbers of emulated nodes.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    pause: Annotated[float, typer.Option(help="Seconds that a step computes.")] = 0.25,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 30,
) -> None:
    """Time SGP where computation uses no core."""
    console.print(f"one process per node, {rate} between nodes, {pause:g} s of computation")
    cases = [Timed(name, m, steps * (4 if full else 1), 5) for name, m in METHODS.items()]
    found: Found = {}
    for count in map(int, nodes.split(",")):
        timed = step_times(cases, count, 1, rate, (pause, WIDTH))
        found[count] = {case.name: pace for case, pace in zip(cases, timed, strict=True)}
    title = f"A step of {pause:g} s of computation on accelerators, {rate}"
    report(BENCH, title, HEADINGS, rows(found, rate), claims(found, rate),
           measured=found)  # fmt: skip


if __name__ == "__main__":
    app()
