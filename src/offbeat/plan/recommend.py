"""The recommendation of a plan: which method, and why."""

from collections.abc import Sequence

from offbeat.kit import quantity
from offbeat.plan.choose import CLOSE, first_fast
from offbeat.plan.result import Row, Setup

WORDS = {
    "compute": "computing",
    "passes": "passes over memory",
    "latency": "the latency of messages",
    "bandwidth": "the bytes of messages",
    "stragglers": "waiting for slow ranks",
}


def choose(rows: Sequence[Row]) -> Row:
    """Return the first row whose step takes at most 1.05 times as long as the fastest one.

    Methods are listed in the order of preference: what is not slower is not given up.
    """
    return rows[first_fast(row.prediction.seconds for row in rows)]


def reason(chosen: Row, rows: Sequence[Row], baseline: str, setup: Setup) -> str:
    """Return a sentence on the method that was chosen among ``rows``, by the times of steps.

    And one on the method that is best by what its steps are worth, if that is another one.
    """
    return _by_time(chosen, rows, baseline, setup) + _by_worth(chosen, rows)


def _by_worth(chosen: Row, rows: Sequence[Row]) -> str:
    known = [(row.faster * row.worth.steps, row) for row in rows if row.worth is not None]
    own = next((gain for gain, row in known if row is chosen), None)
    if own is None:  # nobody knows whether another one is better
        return ""
    gain, best = max(known, key=lambda each: each[0])
    if gain <= CLOSE * own:
        return ""
    return (
        f" By what steps are worth, {best.name} reaches a loss first: "
        f"{quantity.times(best.faster)} the steps, of which one is worth {best.worth}."
    )


def _by_time(chosen: Row, rows: Sequence[Row], baseline: str, setup: Setup) -> str:
    nodes = f"{chosen.nodes} nodes" if chosen.nodes > 1 else "1 node"
    where = f"On {nodes} at {quantity.rate(int(setup.rate))}"
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
    if chosen.faster <= 1:
        return f"{where}, use {chosen.name}: a step takes {took}{ending}."
    parts = other.prediction.parts
    limit = float(vars(parts)[parts.limit]) / other.prediction.seconds
    return (
        f"{where}, use {chosen.name}: a step takes {took}, {quantity.times(chosen.faster)} faster "
        f"than {baseline}, which spends {quantity.percent(limit)} of its step on "
        f"{WORDS[parts.limit]}{ending}."
    )
