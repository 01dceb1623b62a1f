"""The model of time predicts steps between nodes 30 to 200 ms apart from the options of the lab."""

from dataclasses import dataclass, replace
from statistics import median

from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.ranks import on_nodes
from bench.plan.cells import Cell, Layout, measure
from bench.plan.links import Links
from bench.plan.network import METHODS, Recorded, kept, recorded
from offbeat.kit.quantity import parse_rate
from offbeat.lab.network import links
from offbeat.plan import Fabric, Speeds
from offbeat.plan.sites import Sites

NEAR = "250mbit"  # where the software of a message is measured: nearly all of its round trip
WITHIN, SHARE = 0.10, 0.95
BENCH = Bench(
    name="plan/far", minutes=10,
    claim="The model of time predicts the step of every method between nodes 30 to 200 ms apart",
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """Nodes of the lab, and the options of their links."""

    nodes: int
    rate: str
    options: links.LinkOptions

    def fabric(self, near: Links) -> Fabric:
        """What a plan is told: the options, and the software of a message."""
        given = links.Links.parse(self.rate, **self.options)
        software = near.fabric(Layout(self.nodes))
        latency = software.latency + given.down.latency
        far = replace(software, rate=parse_rate(self.rate), latency=latency)
        return replace(far, loss=given.down.loss, sites=Sites.of(given))


NETWORKS = {
    "4 nodes, 30 ms": Network(4, "100mbit", {"latency": "15ms"}),
    "4 nodes, 60 ms": Network(4, "100mbit", {"latency": "30ms"}),
    "4 nodes, 100 ms": Network(4, "100mbit", {"latency": "50ms"}),
    "2 nodes, 200 ms": Network(2, "50mbit", {"latency": "100ms"}),
    "sites 2,2, 60 ms": Network(4, "250mbit", {"sites": [2, 2], "between": ["30ms@50mbit"]}),
}


def measured(rounds: int) -> list[Recorded]:
    """All methods on every network. Other load can only add to a step: the least counts."""
    near, speeds, found = Links.measured(NEAR), Speeds.measure(), []
    for far in NETWORKS.values():
        layout, where = Layout(far.nodes), (far.nodes, 1, far.rate)
        runs = [on_nodes(measure, (METHODS, layout), *where, **far.options) for _ in range(rounds)]
        alone = min((profile for profile, _ in runs), key=lambda profile: profile.compute)
        every = zip(METHODS, *(times for _, times in runs), strict=True)
        seconds = {method.name: min(time.step for time in times) for method, *times in every}
        profile = replace(alone, speeds=speeds)
        found.append(Recorded(layout, far.rate, near, profile, seconds))
    return found


@command(BENCH, "--rounds 2", again="Predict what was measured last.")
def app(again: bool = False, rounds: int = 1) -> Result:
    """Measure all methods beside the step of a rank alone, and predict them."""
    runs, found, rows = recorded(BENCH.name) if again else measured(rounds), [], {}
    for (name, far), run in zip(NETWORKS.items(), runs, strict=True):
        for method in METHODS:
            given = run.seconds[method.name], run.crowded, far.fabric(run.links)
            cell = Cell.of(method, name, far.rate, *given)
            found.append(cell)
            line = rows.setdefault(method.name, [method.name])
            line.append(f"{cell.measured:.3f} s, {cell.error:+.1%}")
    errors = [abs(cell.error) for cell in found]
    met = sum(error <= WITHIN for error in errors)
    said = f"{met} of {len(found)}; the median error is {median(errors):.1%}"
    holds = met >= SHARE * len(found)
    claims = [Claim(f"cells within {WITHIN:.0%}", f"{SHARE:.0%}", said, holds, GOAL)]
    title = "Seconds of a step, and the error of its prediction; 1.6 MB, 0.2 s of computing"
    headings = "method", *NETWORKS
    return Result(title, headings, [*map(tuple, rows.values())], claims, found, kept(runs))
