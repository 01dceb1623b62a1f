"""Predicted against measured times of a step on far nodes and sites, 30 to 200 ms apart.

As in plan/network, but nothing is measured of the links: the prediction knows what the options of
the lab say, and the 128 KiB that its links pass after a pause. The least of all rounds counts,
since other load on the machine can only add time.
"""

from dataclasses import asdict, dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.pause import Paused
from bench.harness.ranks import on_nodes
from bench.plan.cells import PAUSE, WIDTH, Cell, Layout, measure
from bench.plan.network import METHODS
from offbeat.kit.quantity import parse_rate
from offbeat.lab.network.links import LinkOptions, Links
from offbeat.plan import Fabric, Parameter, Profile, Speeds, predict
from offbeat.plan.sites import Sites

BENCH = Bench(
    name="plan/far",
    claim="The model of time predicts the step of every method between nodes 30 to 200 ms apart",
    minutes=10,
)
SOFTWARE, BURST = 1e-4, 2**17  # seconds of a message, and bytes that the lab's links pass at once
WITHIN, SHARE = 0.10, 0.95


@dataclass(frozen=True)
class Network:
    """Nodes of the lab, and the options of their links."""

    nodes: int
    rate: str
    far: LinkOptions

    @property
    def fabric(self) -> Fabric:
        """What a plan is told."""
        links = Links.parse(self.rate, **self.far)
        latency = SOFTWARE + links.down.latency
        fabric = Fabric(nodes=self.nodes, rate=parse_rate(self.rate), latency=latency, burst=BURST)
        return replace(fabric, loss=links.down.loss, sites=Sites.of(links))


NETWORKS = {
    "4 nodes, 30 ms": Network(4, "100mbit", {"latency": "15ms"}),
    "4 nodes, 60 ms": Network(4, "100mbit", {"latency": "30ms"}),
    "4 nodes, 100 ms": Network(4, "100mbit", {"latency": "50ms"}),
    "2 nodes, 200 ms": Network(2, "50mbit", {"latency": "100ms"}),
    "sites 2,2, 60 ms": Network(4, "250mbit", {"sites": [2, 2], "between": ["30ms@50mbit"]}),
}


Record = dict[str, Any]  # network, method, measured, and the three times of a step alone


def record(name: str, network: Network) -> list[Record]:
    """Measure all methods once, beside the step of a rank alone."""
    question = METHODS, Layout(network.nodes)
    profile, times = on_nodes(measure, question, network.nodes, 1, network.rate, **network.far)
    alone = profile.forward, profile.backward, profile.optimizer
    return [
        {"network": name, "method": method.name, "measured": time.step, "alone": alone}
        for method, time in zip(METHODS, times, strict=True)
    ]


def cells(records: list[Record], speeds: Speeds) -> list[Cell]:
    """Predict what was recorded, from the shortest step alone on each network."""
    model, found = Paused(PAUSE, WIDTH), []
    parameters = [Parameter(name, p.numel()) for name, p in model.named_parameters()]
    for name, network in NETWORKS.items():
        ours = [each for each in records if each["network"] == name]
        alone = min((each["alone"] for each in ours), key=sum, default=[PAUSE])
        for method in METHODS:
            times = [each["measured"] for each in ours if each["method"] == method.name]
            if times:
                profile = Profile.by_size(parameters, *alone, speeds)
                made = predict(method.algorithm, profile, network.fabric)
                limit, least = made.parts.limit, min(times)
                found.append(Cell(method.name, name, network.rate, least, made.seconds, limit))
    return found


@command(BENCH, "--rounds 2")
def app(rounds: int = 1) -> Result:
    """Measure and predict every method on every network."""
    runs = [record(*network) for network in NETWORKS.items() for _ in range(rounds)]
    found = cells([*chain(*runs)], Speeds.measure())
    errors = [abs(cell.error) for cell in found]
    near = sum(error <= WITHIN for error in errors)
    said = f"{near} of {len(found)}; the median error is {median(errors):.1%}"
    claims = [Claim(f"cells within {WITHIN:.0%}", f"{SHARE:.0%}", said,
                    near >= SHARE * len(found), GOAL)]  # fmt: skip
    rows = []
    for method in METHODS:
        line = [method.name]
        for name in NETWORKS:
            line += [f"{c.measured:.3f} s, {c.error:+.1%}" for c in found
                     if (c.method, c.layout) == (method.name, name)] or [""]  # fmt: skip
        rows.append(tuple(line))
    title = "Seconds of a step, and the error of its prediction; 1.6 MB, 0.2 s of computing"
    return Result(title, ("method", *NETWORKS), rows, claims, [*map(asdict, found)])
