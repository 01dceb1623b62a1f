"""The model of time predicts the step of every method behind slow links: nothing is fitted."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from bench.harness import Bench, Claim, Result, command, console
from bench.harness.bounds import at_most
from bench.harness.ranks import on_nodes
from bench.plan.cells import PAUSE, Cell, Layout, case, measure
from offbeat.lab import Lab
from offbeat.lab.check import PAYLOAD, LinkMeasurements, measure_links
from offbeat.plan import Fabric, Speeds, Stragglers

GOAL, MIDDLE = 0.10, 0.05
BENCH = Bench(
    name="plan/network", minutes=10, full_minutes=50,
    claim="The model of time predicts the step of every method behind slow links",
)  # fmt: skip
RATES = ("25mbit", "100mbit", "250mbit")
METHODS = [
    case("ddp"), case("ddp(wire='bf16')"), case("lags(density=0.01)"), case("sgp", 12, 4),
    case("sgp(overlap=1)", 12, 4), case("d_psgd"), case("adasum"), case("local_sgd(every=4)", 8, 4),
    case("daso(every=4)", 8, 8), case("diloco(every=4,delay=2)", 8, 8),
    case("diloco(every=4,wire='int8')", 8, 4), case("sparse_loco(every=4)", 8, 4), case("ad_psgd"),
]  # fmt: skip
INSIDE = [  # with several ranks on a node
    case("ddp"), case("lags(density=0.01)"), case("sgp(within='local')", 12, 4),
    case("d_psgd(within='local')"), case("adasum(within='local')"),
    case("local_sgd(every=4,within='local')", 8, 4), case("daso(every=4)", 8, 8),
    case("diloco(every=4,delay=2,within='local')", 8, 8), case("ad_psgd(within='local')"),
]  # fmt: skip
EXTRA = [Layout(4, slow=4.0), Layout(4, 2), Layout(2, computes=True), Layout(16)]


def cells(layout: Layout, rate: str, links: LinkMeasurements, speeds: Speeds) -> Iterator[Cell]:
    """Measure all methods in one run, and predict them from the step of a rank alone."""
    methods = METHODS if layout.each == 1 else INSIDE
    profile, times = on_nodes(measure, (methods, layout), layout.nodes, layout.each, rate)
    fabric = Fabric(
        nodes=layout.nodes,
        ranks_per_node=layout.each,
        rate=1e6 * links.both_ways_mbit / PAYLOAD,
        latency=links.round_trip_ms / 2e3,
        inside_rate=1e6 * (links.inside_node_mbit or links.both_ways_mbit),
        inside_latency=links.round_trip_ms / 4e3,
    )
    profile = replace(profile, speeds=speeds)
    # Only the pause of the slow rank is longer, not what else its step takes.
    slow = Stragglers(first_factor=1 + (layout.slow - 1) * PAUSE / profile.compute)
    for method, time in zip(methods, times, strict=True):
        yield Cell.of(method, str(layout), rate, time.step, profile, fabric, slow)


@command(
    BENCH, "--nodes 4 --rates 100mbit", "--full", nodes="Numbers of nodes, and 2x2.",
    full="Also 16 nodes, 4x2, one of 4 nodes 4 times slower, and 2 that compute.",
    rates="Of every node's link.",
)  # fmt: skip
def app(full: bool = False, nodes: str = "2,4,8,2x2", rates: str = ",".join(RATES)) -> Result:
    """Measure the links as ``offbeat lab --check``, then all methods on every layout and rate."""
    layouts = [Layout(*map(int, each.split("x"))) for each in nodes.split(",")]
    shown, speeds, found = rates.split(","), Speeds.measure(), []
    for rate in shown:
        with Lab(2, 2, rate) as runner:
            links = measure_links(runner)
        console.print(f"{rate}: {links.both_ways_mbit:.1f} Mbit/s, {links.round_trip_ms:.2f} ms")
        for layout in layouts + (EXTRA if full else []):
            found += cells(layout, rate, links, speeds)
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
    return Result(title, headings, [*map(tuple, rows.values())], claims, found)
