"""A plan as plain data: the predictions for all methods and numbers of nodes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import final

from offbeat.compare import Method, quantity
from offbeat.plan.fabric import Fabric
from offbeat.plan.predict import Prediction, predict, seconds_of_step
from offbeat.plan.profile import Profile
from offbeat.plan.stragglers import Stragglers

FACTORS = (1 / 30, 0.1, 1 / 3, 1.0, 3.0, 10.0, 30.0)  # of the rate, in a map
CLOSE = 1.1  # times the fastest step: methods within that are taken as equally fast


@final
@dataclass(frozen=True)
class Setup:
    """The conditions that all predictions have in common; rates in bit/s, times in seconds."""

    profile: str
    numel: int
    nbytes: int
    compute: float
    memory: int | None
    ranks_per_node: int
    rate: float
    latency: float
    inside_rate: float
    full_duplex: bool
    jitter: str
    late: str
    device_factor: float

    @classmethod
    def of(
        cls,
        name: str,
        profile: Profile,
        fabric: Fabric,
        stragglers: tuple[str, str],
        device_factor: float,
    ) -> "Setup":
        """Describe a profile and a network; ``stragglers`` are jitter and late steps as text."""
        return cls(
            profile=name,
            numel=profile.numel,
            nbytes=profile.nbytes,
            compute=profile.compute,
            memory=profile.memory,
            ranks_per_node=fabric.ranks_per_node,
            rate=fabric.rate,
            latency=fabric.latency,
            inside_rate=fabric.inside_rate,
            full_duplex=fabric.full_duplex,
            jitter=stragglers[0],
            late=stragglers[1],
            device_factor=device_factor,
        )


@final
@dataclass(frozen=True)
class Row:
    """The prediction for one method and number of nodes.

    ``faster`` is the baseline's time of a step divided by this method's.
    """

    name: str
    nodes: int
    faster: float
    prediction: Prediction


@final
@dataclass(frozen=True)
class Plan:
    """Holds the predictions of ``offbeat plan``, in the order of methods.

    ``at`` is the number of nodes that is shown in detail.
    """

    setup: Setup
    nodes: tuple[int, ...]
    at: int
    baseline: str
    rows: tuple[Row, ...]
    recommended: str
    reason: str

    def of(self, nodes: int) -> list[Row]:
        """Return the rows for a number of nodes."""
        return [row for row in self.rows if row.nodes == nodes]

    def to_json(self) -> str:
        """Return all fields as JSON text."""
        return json.dumps(asdict(self), indent=2)


@final
@dataclass(frozen=True)
class Question:
    """What a plan is made for: methods in the order of preference, and networks by size."""

    setup: Setup
    methods: tuple[Method, ...]
    baseline: Method
    profile: Profile
    fabrics: tuple[Fabric, ...]
    stragglers: Stragglers

    def rows(self, fabric: Fabric, progress: Callable[[], None] = lambda: None) -> list[Row]:
        """Predict all methods on one network.

        Raises ``ValueError``, with the method and the layout, where a method refuses it.
        """
        found: dict[Method, Prediction] = {}
        for method in self.methods:
            try:
                found[method] = predict(method.algorithm, self.profile, fabric, self.stragglers)
            except ValueError as error:
                each = fabric.ranks_per_node
                layout = f"{fabric.nodes} nodes" + (f" of {each} ranks" if each > 1 else "")
                raise ValueError(f"{method.text} on {layout}: {error}") from None
            progress()
        against = found[self.baseline].seconds
        return [Row(m.text, fabric.nodes, against / p.seconds, p) for m, p in found.items()]

    @property
    def floors(self) -> set[str]:
        """The methods that exchange nothing."""
        return {method.text for method in self.methods if method.is_floor}


def make_plan(question: Question, at: int, progress: Callable[[], None] = lambda: None) -> Plan:
    """Predict every method for every number of nodes; ``progress`` is called after each."""
    rows = [row for fabric in question.fabrics for row in question.rows(fabric, progress)]
    shown = [row for row in rows if row.nodes == at and row.name not in question.floors]
    chosen = choose(shown)
    return Plan(
        setup=question.setup,
        nodes=tuple(fabric.nodes for fabric in question.fabrics),
        at=at,
        baseline=question.baseline.text,
        rows=tuple(rows),
        recommended=chosen.name,
        reason=_reason(chosen, shown, question.baseline.text, question.setup),
    )


@final
@dataclass(frozen=True)
class WinMap:
    """The method chosen and its seconds of a step, for each rate (rows) and number of nodes."""

    rates: tuple[float, ...]
    nodes: tuple[int, ...]
    winners: tuple[tuple[tuple[str, float], ...], ...]


def win_map(question: Question, progress: Callable[[], None] = lambda: None) -> WinMap:
    """Choose a method for every number of nodes, at rates from 1/30 to 30 times the given one.

    ``progress`` is called after each rate.
    """
    methods = [method for method in question.methods if not method.is_floor]
    rates = tuple(question.setup.rate * factor for factor in FACTORS)
    winners = []
    for rate in rates:
        row = []
        for fabric in question.fabrics:
            where = question.profile, replace(fabric, rate=rate), question.stragglers
            times = [(m.text, seconds_of_step(m.algorithm, *where)) for m in methods]
            fastest = min(seconds for _, seconds in times)
            row.append(next(pair for pair in times if pair[1] <= CLOSE * fastest))
        winners.append(tuple(row))
        progress()
    return WinMap(rates, tuple(fabric.nodes for fabric in question.fabrics), tuple(winners))


def choose(rows: Sequence[Row]) -> Row:
    """Return the first row whose step takes at most 1.1 times as long as the fastest one.

    Methods are listed in the order of preference: what is not slower is not given up.
    """
    fastest = min(row.prediction.seconds for row in rows)
    return next(row for row in rows if row.prediction.seconds <= CLOSE * fastest)


def _reason(chosen: Row, rows: Sequence[Row], baseline: str, setup: Setup) -> str:
    where = f"On {chosen.nodes} nodes at {quantity.rate(int(setup.rate))}"
    took = quantity.seconds(chosen.prediction.seconds)
    fastest = min(rows, key=lambda row: row.prediction.seconds)
    other = next((row for row in rows if row.name == baseline), None)
    ending = ""
    if fastest is not chosen:
        ending = f"; {fastest.name} is faster by less than {CLOSE - 1:.0%}".replace("%", " %")
    if other is None or other is chosen:
        share = chosen.prediction.parts.compute / chosen.prediction.seconds
        return (
            f"{where}, use {chosen.name}: a step takes {took}, of which "
            f"{quantity.percent(share)} is computing{ending}."
        )
    parts = other.prediction.parts
    limit = float(vars(parts)[parts.limit]) / other.prediction.seconds
    return (
        f"{where}, use {chosen.name}: a step takes {took}, {quantity.times(chosen.faster)} faster "
        f"than {baseline}, which spends {quantity.percent(limit)} of its step on "
        f"{WORDS[parts.limit]}{ending}."
    )


WORDS = {
    "compute": "computing",
    "passes": "passes over memory",
    "latency": "the latency of messages",
    "bandwidth": "the bytes of messages",
    "stragglers": "waiting for slow ranks",
}
