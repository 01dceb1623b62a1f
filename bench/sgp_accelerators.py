"""What a step of Stochastic Gradient Push costs where nodes compute on hardware of their own.

Emulated nodes share the cores of one machine. Here computing is a pause, which takes time but no
core, so that what is left is the method: a step can take no less than the pause, and no less than
the model's bytes take on the link.
"""

from dataclasses import asdict
from typing import Annotated

import typer
from _claims import Claim, report
from _pause import Paused
from _ranks import console
from _steps import Pace, Timed, paces

import offbeat
from offbeat.lab.check import PAYLOAD
from offbeat.lab.network import parse_rate

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
EPILOG = "Examples: `python bench/sgp_accelerators.py`, `python bench/sgp_accelerators.py --full`"
app = typer.Typer(pretty_exceptions_enable=False)
Found = dict[int, dict[str, Pace]]


def floors(found: dict[str, Pace], rate: str) -> dict[str, float]:
    """The least that a step can take: computing, or the wire with TCP's headers."""
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
            text = f"{nodes} nodes: {name} takes as long as the slower of computing and wire"
            made.append(Claim(text, f"at most {GOAL} x", f"{over:.2f} x", over <= GOAL))
    return made


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="Four times the steps.")] = False,
    nodes: Annotated[str, typer.Option(help="Numbers of emulated nodes.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    pause: Annotated[float, typer.Option(help="Seconds that a step computes.")] = 0.25,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 30,
) -> None:
    """Time SGP where computing takes no core."""
    console.print(f"a process a node, {rate} between nodes, {pause:g} s of computing")
    cases = [Timed(name, m, steps * (4 if full else 1), 5) for name, m in METHODS.items()]
    found: Found = {}
    for count in map(int, nodes.split(",")):
        timed = paces(cases, count, 1, rate, (pause, WIDTH))
        found[count] = {case.name: pace for case, pace in zip(cases, timed, strict=True)}
    title = f"A step of {pause:g} s of computing on nodes of their own, {rate}"
    measured = {n: {name: asdict(p) for name, p in each.items()} for n, each in found.items()}
    report("sgp_accelerators", title, HEADINGS, rows(found, rate), claims(found, rate),
           measured=measured)  # fmt: skip


if __name__ == "__main__":
    app()
