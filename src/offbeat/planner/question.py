"""What a plan is made for, and its answers: all predictions, and a map of nodes and rates."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from offbeat.compare import Method
from offbeat.plan.choose import first_fast
from offbeat.plan.fabric import Fabric
from offbeat.plan.predict import Prediction, predict, seconds_of_step
from offbeat.plan.profile import Profile
from offbeat.plan.recommend import choose, reason
from offbeat.plan.result import Plan, Row, Setup
from offbeat.plan.stragglers import Stragglers
from offbeat.plan.worth import worth

FACTORS = (1 / 30, 0.1, 1 / 3, 1.0, 3.0, 10.0, 30.0)  # of the rate, in a map


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
        return [
            Row(m.text, fabric.nodes, against / p.seconds, p, worth(m.text))
            for m, p in found.items()
        ]


def make_plan(question: Question, at: int, progress: Callable[[], None] = lambda: None) -> Plan:
    """Predict every method for every number of nodes; ``progress`` is called after each."""
    rows = [row for fabric in question.fabrics for row in question.rows(fabric, progress)]
    floors = {method.text for method in question.methods if method.is_floor}
    shown = [row for row in rows if row.nodes == at and row.name not in floors]
    chosen = choose(shown)
    return Plan(
        setup=question.setup,
        nodes=tuple(fabric.nodes for fabric in question.fabrics),
        at=at,
        baseline=question.baseline.text,
        rows=tuple(rows),
        recommended=chosen.name,
        reason=reason(chosen, shown, question.baseline.text, question.setup),
    )


@final
@dataclass(frozen=True)
class WinMap:
    """The method chosen and its seconds of a step, for each rate (rows) and number of nodes."""

    rates: tuple[float, ...]
    nodes: tuple[int, ...]
    winners: tuple[tuple[tuple[str, float], ...], ...]


def win_map(question: Question) -> WinMap:
    """Choose a method for every number of nodes, at rates from 1/30 to 30 times the given one."""
    methods = [method for method in question.methods if not method.is_floor]
    rates = tuple(question.setup.rate * factor for factor in FACTORS)
    winners = []
    for rate in rates:
        row = []
        for fabric in question.fabrics:
            where = question.profile, replace(fabric, rate=rate), question.stragglers
            times = [(m.text, seconds_of_step(m.algorithm, *where)) for m in methods]
            row.append(times[first_fast(seconds for _, seconds in times)])
        winners.append(tuple(row))
    return WinMap(rates, tuple(fabric.nodes for fabric in question.fabrics), tuple(winners))
