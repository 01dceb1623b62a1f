"""Seconds per step of LAGS behind slow links, beside dense methods and computation alone.

A GPT of 3.2 million parameters and SGD with momentum, one process per node.
"""

from typing import Annotated

import typer

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.lags.turns import ALONE, FLOOR, HOOK, POWER, TOGETHER, TORCH, Times, in_lab, most

METHODS = (TORCH, "ddp", HOOK, "slgs", "lags", ALONE, TOGETHER, FLOOR)
UNSHAPED = ("ddp", "lags(density='adaptive')")
# Seconds per step of a prototype on this kind of machine: DDP, LAGS and computation alone.
PROTOTYPE = {4: (0.85, 0.258, 0.243), 8: (1.22, 0.55, 0.50)}
BENCH = Bench(
    name="lags/speed",
    claim="A step of LAGS behind slow links",
    minutes=4,
    full_minutes=12,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def rows(nodes: int, rate: str, found: dict[str, Times]) -> list[tuple[str, ...]]:
    """One line for each method."""
    dense = found.get(TORCH, found["ddp"])
    lines = []
    for method, times in found.items():
        share = f"{found[ALONE].over(times):.0%}" if ALONE in found else ""
        sent = "" if times.sent is None else f"{times.sent / 1e6:.2f} MB"
        gain = f"{dense.over(times):.2f}"
        lines.append((f"{nodes}", rate, method, f"{times.step:.3f} s", gain, share, sent))
    return lines


def claims(nodes: int, found: dict[str, Times]) -> list[Claim]:
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


def power(nodes: int, rate: str, steps: int) -> Times | None:
    """Torch's PowerSGD, on nodes of its own: it may crash its processes."""
    try:
        return in_lab(nodes, rate, ["gpt"], [POWER], steps, 1)["gpt"][POWER]
    except RuntimeError as error:
        console.print(f"{POWER} failed: {str(error)[-500:]}", markup=False)
        return None


@app.command(epilog=BENCH.examples("--nodes 4 --full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="20 rounds.")] = False,
    nodes: Annotated[str, typer.Option(help="Numbers of emulated nodes.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    steps: Annotated[int, typer.Option(help="Steps of each method in each round.")] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds of turns.")] = 5,
) -> None:
    """Time LAGS on a GPT behind slow links, and its adaptive mode on fast ones."""
    rounds = 20 if full else rounds
    lines, judged, times = [], [], {}
    for count in map(int, nodes.split(",")):
        found = in_lab(count, rate, ["gpt"], METHODS, steps, rounds)["gpt"]
        lines += rows(count, rate, found)
        judged += claims(count, found)
        times[count] = found
    fast = in_lab(4, None, ["gpt"], UNSHAPED, 2 * steps, 2 * rounds)["gpt"]
    lines += rows(4, "unlimited", fast)
    over = fast[UNSHAPED[1]].over(fast["ddp"]) - 1
    judged.append(Claim("4 nodes, unlimited: adaptive lags costs no more than ddp",
                        "at most 3 % more", f"{over:+.1%}", over <= 0.03))  # fmt: skip
    by_power = power(4, rate, steps)
    outcome = f"{by_power.step:.3f} s" if by_power else "its processes crash"
    judged.append(
        Claim("4 nodes: torch's PowerSGD hook runs on Gloo", "-", outcome, bool(by_power))
    )
    times["unlimited"] = fast
    headings = ("nodes", "rate", "method", "a step", "x dense", "alone / step", "sent a step")
    report(BENCH, "A step of a GPT, SGD", headings, lines, judged, measured=times)


if __name__ == "__main__":
    app()
