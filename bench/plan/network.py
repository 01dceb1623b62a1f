"""Predicted against measured times of a step on emulated nodes.

Computing is a pause, so that two cores do not decide. The link is measured once for each rate, by
``offbeat lab --check``; the step of a rank alone is the profile. Nothing is fitted to a cell.
"""

from collections.abc import Sequence
from statistics import median

from bench.harness import Bench, Claim, Result, command, console, files
from bench.plan.cells import Cell, Layout, case, cells, check, dump, load
from offbeat.plan import Speeds

GOAL, MIDDLE = 0.10, 0.05
BENCH = Bench(
    name="plan/network",
    claim="The model of time predicts the step of every method behind slow links",
    minutes=10,
    full_minutes=50,
)
RATES = ("25mbit", "100mbit", "250mbit")
METHODS = [
    case("ddp"),
    case("ddp(wire='bf16')"),
    case("lags(density=0.01)"),
    case("sgp", 12, 4),
    case("sgp(overlap=1)", 12, 4),
    case("d_psgd"),
    case("adasum"),
    case("local_sgd(every=4)", 8, 4),
    case("daso(every=4)", 8, 8),
    case("diloco(every=4,delay=2)", 8, 8),
    case("diloco(every=4,wire='int8')", 8, 4),
    case("sparse_loco(every=4)", 8, 4),
    case("ad_psgd"),
]
INSIDE = [
    case("ddp"),
    case("lags(density=0.01)"),
    case("sgp(within='local')", 12, 4),
    case("d_psgd(within='local')"),
    case("adasum(within='local')"),
    case("local_sgd(every=4,within='local')", 8, 4),
    case("daso(every=4)", 8, 8),
    case("diloco(every=4,delay=2,within='local')", 8, 8),
    case("ad_psgd(within='local')"),
]
EXTRA = [Layout(4, slow=4.0), Layout(4, 2), Layout(4, computes=True), Layout(16)]


def rows(found: Sequence[Cell], rates: Sequence[str]) -> list[tuple[str, ...]]:
    """One line for each layout and method: measured, predicted and the error at every rate."""
    table = []
    for layout, method in dict.fromkeys((cell.layout, cell.method) for cell in found):
        by_rate = {c.rate: c for c in found if (c.layout, c.method) == (layout, method)}
        line = [layout, method]
        for rate in rates:
            cell = by_rate.get(rate)
            line += ["", "", ""] if cell is None else [
                f"{cell.measured:.3f} s", f"{cell.predicted:.3f} s", f"{cell.error:+.1%}"
            ]  # fmt: skip
        table.append(tuple(line))
    return table


def claims(found: Sequence[Cell]) -> list[Claim]:
    """On the errors of all cells."""
    errors = sorted(abs(cell.error) for cell in found)
    far = [cell for cell in found if abs(cell.error) > GOAL]
    worst = max(found, key=lambda cell: abs(cell.error))
    return [
        Claim(f"every cell of {len(found)} is predicted", f"within {GOAL:.0%}",
              f"{len(far)} are not; the worst, {worst.method} on {worst.layout} at {worst.rate}, "
              f"by {worst.error:+.1%}", not far),
        Claim("the median error is small", f"at most {MIDDLE:.0%}", f"{median(errors):.1%}",
              median(errors) <= MIDDLE),
    ]  # fmt: skip


@command(
    BENCH, "--nodes 4 --rates 100mbit", "--full", "--resume",
    full="Also 16 nodes, 4x2, one node 4 times slower, and real computing.",
    nodes="Numbers of nodes, and 2x2.", rates="Of every node's link.",
    resume="Keep what is recorded.",
)  # fmt: skip
def app(
    full: bool = False, nodes: str = "2,4,8,2x2", rates: str = ",".join(RATES),
    resume: bool = False,
) -> Result:  # fmt: skip
    """Measure and predict every method on every layout, at every rate."""
    layouts = [*map(Layout.parse, nodes.split(",")), *(EXTRA if full else ())]
    kept = files.raw(f"{BENCH.name}-cells")
    found = load(kept) if resume else []
    speeds = Speeds.measure()
    for rate in rates.split(","):
        links = check(rate)
        console.print(f"{rate}: {links.both_ways_mbit:.1f} Mbit/s, {links.round_trip_ms:.2f} ms")
        for layout in layouts:
            known = {c.method for c in found if (c.layout, c.rate) == (str(layout), rate)}
            methods = METHODS if layout.each == 1 else INSIDE
            missing = [each for each in methods if each.name not in known]
            if missing:
                found += cells(missing, layout, rate, links, speeds)
                dump(found, kept)
    places = list(dict.fromkeys(cell.layout for cell in found))
    texts = [each.name for each in (*METHODS, *INSIDE)]
    found.sort(key=lambda cell: (places.index(cell.layout), texts.index(cell.method)))
    shown, headings = list(dict.fromkeys(cell.rate for cell in found)), ["nodes", "method"]
    headings += [f"{rate}, {kind}" for rate in shown for kind in ("measured", "predicted", "error")]
    title = "Seconds of a step, eight layers of 1.6 MB together, 0.2 s of computing"
    return Result(title, headings, rows(found, shown), claims(found), found)
