"""The model of time predicts the step of every method behind slow links: nothing is fitted."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from bench.harness import Bench, Claim, Result, at_most, command
from bench.harness.step_times import Timed
from bench.plan.cells import PAUSE, Cell, Layout, Links, case
from bench.plan.recorded import Recorded, kept, recorded
from offbeat.plan import Speeds, Stragglers

GOAL, MIDDLE = 0.10, 0.05
BENCH = Bench(name="plan/network", minutes=10, full_minutes=50)
RATES = ("25mbit", "100mbit", "250mbit")
METHODS = [  # where two senders meet, TCP needs some steps until they share a link evenly
    case("ddp"), case("ddp(wire='bf16')"), case("lags(density=0.01)"), case("sgp", 12, 4),
    case("sgp(overlap=1)", 12, 8), case("d_psgd", 5, 6), case("adasum"),
    case("local_sgd(every=4)", 8, 4), case("daso(every=4)", 8, 8),
    case("diloco(every=4,delay=2)", 8, 8), case("diloco(every=4,wire='int8')", 8, 4),
    case("sparse_loco(every=4)", 8, 4), case("ad_psgd"),
]  # fmt: skip
INSIDE = [  # with several ranks on a node
    case("ddp"), case("lags(density=0.01)"), case("sgp(within='local')", 12, 4),
    case("d_psgd(within='local')", 5, 6), case("adasum(within='local')"),
    case("local_sgd(every=4,within='local')", 8, 4), case("daso(every=4)", 8, 8),
    case("diloco(every=4,delay=2,within='local')", 8, 8), case("ad_psgd(within='local')"),
]  # fmt: skip
EXTRA = [Layout(4, slow=4.0), Layout(4, 2), Layout(2, computes=True), Layout(16)]


def methods(layout: Layout) -> list[Timed]:
    return METHODS if layout.each == 1 else INSIDE


def anew(run: Recorded, only: str) -> Recorded:
    """Measure what has ``only`` in its name again; if that is a whole run, the links too."""
    among = methods(run.layout)
    if not all(only in run.named(method.name) for method in among):
        return run.again(among, only)
    links = replace(Links.measured(run.rate), round_trip=run.links.round_trip)
    return Recorded.run(among, run.layout, run.rate, links, Speeds.measure())


def cells(run: Recorded) -> Iterator[Cell]:
    """Predict the steps of all methods from the step of a rank alone."""
    layout, fabric, profile = run.layout, run.links.fabric(run.layout), run.crowded
    # Only the pause of the slow rank is longer, not what else its step takes.
    slow = Stragglers(first_factor=1 + (layout.slow - 1) * PAUSE / profile.compute)
    for method in methods(layout):
        given = run.seconds[method.name], profile, fabric, slow
        yield Cell.of(method, str(layout), run.rate, *given)


def measured(layouts: list[Layout], rates: list[str]) -> list[Recorded]:
    """Run all layouts on all rates. Other load can only add to a round trip: the least counts."""
    every, speeds = {rate: Links.measured(rate) for rate in rates}, Speeds.measure()
    least = min(links.round_trip for links in every.values())
    return [
        Recorded.run(methods(layout), layout, rate, replace(every[rate], round_trip=least), speeds)
        for rate in rates
        for layout in layouts
    ]


@command(
    BENCH, "--nodes 4 --rates 100mbit", "--full", nodes="Numbers of nodes, and 2x2.",
    full="Also 16 nodes, 4x2, one of 4 nodes 4 times slower, and 2 that compute.",
    again="Predict what was measured last.",
    only="Measure again what has this in its name, as 'sgp', 'on 16 at 25mbit'.",
    rates="Of every node's link.",
)  # fmt: skip
def app(
    full: bool = False, again: bool = False, only: str = "", nodes: str = "2,4,8,2x2",
    rates: str = ",".join(RATES),
) -> Result:  # fmt: skip
    """Measure the links as ``offbeat lab --check``, then all methods on every layout and rate."""
    layouts = [Layout(*map(int, each.split("x"))) for each in nodes.split(",")]
    if again or only:
        runs = [anew(run, only) if only else run for run in recorded(BENCH.name)]
    else:
        runs = measured(layouts + (EXTRA if full else []), rates.split(","))
    shown = [*dict.fromkeys(run.rate for run in runs)]
    found = [cell for run in runs for cell in cells(run)]
    rows = {}
    for cell in found:
        line = rows.setdefault((cell.layout, cell.method), [cell.layout, cell.method])
        line += f"{cell.measured:.3f} s", f"{cell.predicted:.3f} s", f"{cell.error:+.1%}"
    far = [cell for cell in found if abs(cell.error) > GOAL]
    worst = max(found, key=lambda cell: abs(cell.error))
    claims = [
        Claim(f"every cell of {len(found)} is predicted", f"within {GOAL:.0%}",
              f"{len(far)} are not; the worst, {worst.method} on {worst.layout} at {worst.rate}, "
              f"by {worst.error:+.1%}", not far),
        at_most("the median error is small", median(abs(cell.error) for cell in found), MIDDLE,
                "{:.1%}"),
    ]  # fmt: skip
    headings = ["nodes", "method"]
    headings += [f"{rate}, {kind}" for rate in shown for kind in ("measured", "predicted", "error")]
    title = "Seconds of a step, eight layers of 1.6 MB together, 0.2 s of computing"
    return Result(title, headings, [*map(tuple, rows.values())], claims, found, kept(runs))
