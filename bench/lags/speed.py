"""Behind slow links a step of LAGS is faster than dense ones, and hardly more than computing.

A GPT of 3.2 million parameters and SGD with momentum, one process per node.
"""

from collections.abc import Iterator
from math import isnan

from bench.harness import Bench, Claim, Result, command, console, numbers
from bench.harness.attached import ALONE, TORCH
from bench.harness.gpt import gpt
from bench.harness.training import Found, Training, times
from bench.lags.ways import FLOOR, HOOK, POWER, attach, most

METHODS = (TORCH, "ddp", HOOK, "slgs", "lags", ALONE, FLOOR)
ADAPTIVE = "lags(density='adaptive')"
# Seconds per step of a prototype on this kind of machine: DDP, LAGS and computation alone.
PROTOTYPE = {4: (0.85, 0.258, 0.243), 8: (1.22, 0.55, 0.50)}
HEADINGS = ("nodes", "rate", "method", "a step", "x dense", "alone / step", "sent a step")
BENCH = Bench(name="lags/speed", minutes=4, full_minutes=12)


def rows(nodes: int, rate: str, found: Found) -> Iterator[tuple[str, ...]]:
    dense = found.get(TORCH, found["ddp"])
    for method, each in found.items():
        share = f"{found[ALONE].over(each):.0%}" if ALONE in found else ""
        sent = "" if isnan(each.bytes) else f"{each.bytes / 1e6:.2f} MB"
        gain = f"{dense.over(each):.2f}"
        yield f"{nodes}", rate, method, f"{each.step:.3f} s", gain, share, sent


def claims(nodes: int, found: Found) -> list[Claim]:
    lags, slgs, alone = (found[name] for name in ("lags", "slgs", ALONE))
    near, share = found[FLOOR].over(lags), alone.over(lags)
    gain, dense = slgs.over(lags), found["ddp"].over(lags)
    enough, faster = "at least 95 %", "faster"
    if nodes in PROTOTYPE:
        ddp, ours, computing = PROTOTYPE[nodes]
        enough, faster = f"{enough}; a prototype: {computing / ours:.0%}", f"{ddp / ours:.1f} x"
    return [
        Claim(f"{nodes} nodes: computation is nearly all of a step of lags", enough,
              f"{share:.0%}", share >= 0.95),
        Claim(f"{nodes} nodes: lags is near a barrier and three passes over memory a step",
              "at least 95 %", f"{near:.0%}", near >= 0.95),
        Claim(f"{nodes} nodes: lags is faster than slgs",
              f"at most {most(alone, slgs):.2f} x, by eq. 19", f"{gain:.2f} x", gain > 1),
        Claim(f"{nodes} nodes: lags is faster than dense", faster, f"{dense:.1f} x ddp", dense > 1),
    ]  # fmt: skip


def power(rate: str, steps: int) -> Claim:
    """Torch's PowerSGD, on nodes of its own: it may crash its processes."""
    text = "4 nodes: torch's PowerSGD hook runs on Gloo"
    try:
        found = times(Training(gpt, (POWER,), steps, 1, attach=attach), 4, rate)
    except RuntimeError as error:
        console.print(f"{POWER} failed: {str(error)[-500:]}", markup=False)
        return Claim(text, "-", "its processes crash", False)
    return Claim(text, "-", f"{found[POWER].step:.3f} s", True)


@command(BENCH, "--nodes 4 --full", full={"rounds": 20}, steps="Of each method in each round.")
def app(nodes: str = "4,8", rate: str = "250mbit", steps: int = 3, rounds: int = 5) -> Result:
    turns = Training(gpt, METHODS, steps, rounds, attach=attach)
    found = {count: times(turns, count, rate) for count in numbers(nodes)}
    lines = [row for count, each in found.items() for row in rows(count, rate, each)]
    judged = [claim for count, each in found.items() for claim in claims(count, each)]
    turns = Training(gpt, ("ddp", ADAPTIVE), 2 * steps, 2 * rounds, attach=attach)
    fast = times(turns, 4, None)
    over = fast[ADAPTIVE].over(fast["ddp"]) - 1
    text = "4 nodes, unlimited: adaptive lags costs no more than ddp"
    judged.append(Claim(text, "at most 3 % more", f"{over:+.1%}", over <= 0.03))
    judged.append(power(rate, steps))
    lines += rows(4, "unlimited", fast)
    measured = {**found, "unlimited": fast}
    return Result("A step of a GPT, SGD", HEADINGS, lines, judged, measured)
