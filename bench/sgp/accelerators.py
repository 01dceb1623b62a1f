"""Seconds per step of SGP where computation uses no CPU core, as on an accelerator.

Emulated nodes share the cores of one machine. Here computation is a pause, so that a step takes
at least the pause, and at least the time of the model's bytes on the link.
"""

import offbeat
from bench.harness import Bench, Claim, Result, command, numbers
from bench.harness.pause import Paused
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


def floors(found: dict[str, StepTime], rate: str) -> dict[str, float]:
    """The least that a step can take: computation, or the bytes on the link with TCP headers."""
    size = sum(p.nbytes for p in Paused(0.0, WIDTH).parameters())
    wire = 8 * size / (parse_rate(rate) * PAYLOAD)
    return {name: max(found[ALONE].step, models * wire) for name, models in WIRES.items()}


def claim(nodes: int, name: str, over: float) -> Claim:
    text = f"{nodes} nodes: {name} takes as long as the slower of computation and link"
    return Claim(text, f"at most {GOAL} x", f"{over:.2f} x", over <= GOAL)


@command(
    BENCH, "--full", full="Four times the steps.", nodes="Numbers of emulated nodes.",
    pause="Seconds that a step computes.",
)  # fmt: skip
def app(
    full: bool = False,
    nodes: str = "4,8",
    rate: str = "250mbit",
    pause: float = 0.25,
    steps: int = 30,
) -> Result:
    """Time SGP where computation uses no core."""
    cases = [Timed(name, each, steps * (4 if full else 1), 5) for name, each in METHODS.items()]
    rows, judged, found = [], [], {}
    for count in numbers(nodes):
        timed = found[count] = step_times(cases, count, 1, rate, (pause, WIDTH))
        least = floors(timed, rate)
        for name, pace in timed.items():
            faster, over = timed["ddp"].step / pace.step, ("", "")
            if name in least:
                over = f"{least[name]:.3f} s", f"{pace.step / least[name]:.2f}"
                judged.append(claim(count, name, pace.step / least[name]))
            rows.append((f"{count}", name, f"{pace.step:.3f} s", f"{faster:.2f}", *over))
    title = f"A step of {pause:g} s of computation on accelerators, {rate}"
    return Result(title, HEADINGS, rows, judged, measured=found)
