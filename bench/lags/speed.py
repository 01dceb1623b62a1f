"""Seconds per step of LAGS behind slow links, beside dense methods and computation alone.

A GPT of 3.2 million parameters and SGD with momentum, one process per node.
"""

from math import isnan

from bench.harness import Bench, Claim, Result, command, console
from bench.harness.attached import ALONE, TORCH
from bench.harness.gpt import gpt
from bench.harness.training import Found, Training, times
from bench.lags.ways import FLOOR, HOOK, POWER, attach, most

METHODS = (TORCH, "ddp", HOOK, "slgs", "lags", ALONE, FLOOR)
ADAPTIVE = "lags(density='adaptive')"
# Seconds per step of a prototype on this kind of machine: DDP, LAGS and computation alone.
PROTOTYPE = {4: (0.85, 0.258, 0.243), 8: (1.22, 0.55, 0.50)}
HEADINGS = ("nodes", "rate", "method", "a step", "x dense", "alone / step", "sent a step")
BENCH = Bench(
    name="lags/speed", claim="A step of LAGS behind slow links", minutes=4, full_minutes=12
)


def rows(nodes: int, rate: str, found: Found) -> list[tuple[str, ...]]:
    """One line for each method."""
    dense, lines = found.get(TORCH, found["ddp"]), []
    for method, each in found.items():
        share = f"{found[ALONE].over(each):.0%}" if ALONE in found else ""
        sent = "" if isnan(each.bytes) else f"{each.bytes / 1e6:.2f} MB"
        gain = f"{dense.over(each):.2f}"
        lines.append((f"{nodes}", rate, method, f"{each.step:.3f} s", gain, share, sent))
    return lines


def claims(nodes: int, found: Found) -> list[Claim]:
    lags, slgs, alone = (found[name] for name in ("lags", "slgs", ALONE))
    near = found[FLOOR].over(lags)
    share, gain, dense = alone.over(lags), slgs.over(lags), found["ddp"].over(lags)
    prototype = PROTOTYPE.get(nodes)
    was = f"at least 95 %{f'; a prototype: {prototype[2] / prototype[1]:.0%}' if prototype else ''}"
    return [
        Claim(f"{nodes} nodes: computation is nearly all of a step of lags", was,
              f"{share:.0%}", share >= 0.95),
        Claim(f"{nodes} nodes: lags is near a barrier and three passes over memory a step",
              "at least 95 %", f"{near:.0%}", near >= 0.95),
        Claim(f"{nodes} nodes: lags is faster than slgs",
              f"at most {most(alone, slgs):.2f} x, by eq. 19", f"{gain:.2f} x", gain > 1),
        Claim(f"{nodes} nodes: lags is faster than dense",
              f"{prototype[0] / prototype[1]:.1f} x" if prototype else "faster",
              f"{dense:.1f} x ddp", dense > 1),
    ]  # fmt: skip


def power(rate: str, steps: int) -> Claim:
    """Torch's PowerSGD, on nodes of its own: it may crash its processes."""
    text, outcome, runs = "4 nodes: torch's PowerSGD hook runs on Gloo", "its processes crash", True
    try:
        found = times(Training(gpt, (POWER,), steps, 1, attach=attach), 4, rate)
        outcome = f"{found[POWER].step:.3f} s"
    except RuntimeError as error:
        console.print(f"{POWER} failed: {str(error)[-500:]}", markup=False)
        runs = False
    return Claim(text, "-", outcome, runs)


@command(
    BENCH, "--nodes 4 --full",
    full="20 rounds.", nodes="Numbers of emulated nodes.", steps="Of each method in each round.",
)  # fmt: skip
def app(
    full: bool = False, nodes: str = "4,8", rate: str = "250mbit", steps: int = 3, rounds: int = 5
) -> Result:
    """Time LAGS on a GPT behind slow links, and its adaptive mode on fast ones."""
    rounds = 20 if full else rounds
    lines, judged, found = [], [], {}
    for count in nodes.split(","):
        turns = Training(gpt, METHODS, steps, rounds, attach=attach)
        found[count] = times(turns, int(count), rate)
        lines += rows(int(count), rate, found[count])
        judged += claims(int(count), found[count])
    turns = Training(gpt, ("ddp", ADAPTIVE), 2 * steps, 2 * rounds, attach=attach)
    fast = found["unlimited"] = times(turns, 4, None)
    over = fast[ADAPTIVE].over(fast["ddp"]) - 1
    judged += [
        Claim("4 nodes, unlimited: adaptive lags costs no more than ddp", "at most 3 % more",
              f"{over:+.1%}", over <= 0.03),
        power(rate, steps),
    ]  # fmt: skip
    lines += rows(4, "unlimited", fast)
    return Result("A step of a GPT, SGD", HEADINGS, lines, judged, found)
