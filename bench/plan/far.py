"""The model of time predicts steps between nodes 30 to 200 ms apart from the options of the lab."""

from dataclasses import replace
from statistics import median

from bench.harness import GOAL, Bench, Claim, Result, command
from bench.plan import network
from bench.plan.cells import Cell, Layout, Links
from bench.plan.recorded import Recorded, kept, recorded
from offbeat.kit.quantity import parse_rate
from offbeat.lab.network import links
from offbeat.plan import Fabric, Speeds
from offbeat.plan.sites import Sites

NEAR = "250mbit"  # where the software of a message is measured: nearly all of its round trip
WITHIN, SHARE = 0.10, 0.95
BENCH = Bench(name="plan/far", minutes=10)


NETWORKS: dict[str, tuple[int, str, links.LinkOptions]] = {
    "4 nodes, 30 ms": (4, "100mbit", {"latency": "15ms"}),
    "4 nodes, 60 ms": (4, "100mbit", {"latency": "30ms"}),
    "4 nodes, 100 ms": (4, "100mbit", {"latency": "50ms"}),
    "2 nodes, 200 ms": (2, "50mbit", {"latency": "100ms"}),
    "sites 2,2, 60 ms": (4, "250mbit", {"sites": [2, 2], "between": ["30ms@50mbit"]}),
}


def fabric(run: Recorded) -> Fabric:
    """What a plan is told: the options, and the software of a message."""
    given, near = links.Links.parse(run.rate, **run.options), run.links.fabric(run.layout)
    far = replace(near, rate=parse_rate(run.rate), latency=near.latency + given.down.latency)
    return replace(far, loss=given.down.loss, sites=Sites.of(given))


def close(cells: list[Cell]) -> int:
    """How many are predicted within 10 %."""
    return sum(abs(cell.error) <= WITHIN for cell in cells)


def measured(rounds: int) -> list[Recorded]:
    """All methods on every network, the least of some rounds."""
    near, speeds, found = Links.measured(NEAR), Speeds.measure(), []
    for nodes, rate, options in NETWORKS.values():
        run = Recorded.run(network.METHODS, Layout(nodes), rate, near, speeds, options)
        for _ in range(rounds - 1):
            run = run.again(network.METHODS)
        found.append(run)
    return found


@command(
    BENCH, "--rounds 2", again="Predict what was measured last.",
    only="Measure again what has this in its name, as 'sgp on 4 at 100mbit, latency=50ms'.",
)  # fmt: skip
def app(again: bool = False, only: str = "", rounds: int = 1) -> Result:
    """Measure all methods beside the step of a rank alone, and predict them."""
    runs, found, rows = recorded(BENCH.name) if again or only else measured(rounds), [], {}
    runs = [run.again(network.METHODS, only) if only else run for run in runs]
    for name, run in zip(NETWORKS, runs, strict=True):
        for method in network.METHODS:
            given = run.seconds[method.name], run.crowded, fabric(run)
            cell = Cell.of(method, name, run.rate, *given)
            found.append(cell)
            line = rows.setdefault(method.name, [method.name])
            line.append(f"{cell.measured:.3f} s, {cell.error:+.1%}")
    near = [cell for run in recorded(network.BENCH.name) for cell in network.cells(run)]
    every = [*found, *near]
    met, share = close(found), close(every) / len(every)
    middle = median(abs(cell.error) for cell in found)
    said = f"{close(every)} of {len(every)}, {share:.1%}; of those here {met} of {len(found)}, "
    said += f"with a median error of {middle:.1%}"
    text = f"cells within {WITHIN:.0%}, with those of plan/network"
    claims = [Claim(text, f"{SHARE:.0%}", said, share >= SHARE, GOAL)]
    title = "Seconds of a step, and the error of its prediction; 1.6 MB, 0.2 s of computing"
    headings = "method", *NETWORKS
    return Result(title, headings, [*map(tuple, rows.values())], claims, found, kept(runs))
