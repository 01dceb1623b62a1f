"""The order of readiness, as it is declared and saved."""

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from offbeat.exchange import Variable, plain


class Ordered(Protocol):
    """Keeps the parameters in the order in which they became ready, if that was measured."""

    order: list[str]
    is_measured: bool


def declared_order(owner: Ordered, parameters: Collection[str]) -> Iterator[Variable]:
    """Yield the declarations: messages of ranks with different orders would not fit together."""
    yield plain("shared", owner, "order", lambda order: order_fault(order, parameters))
    yield plain("shared", owner, "is_measured", name="measured")


def order_fault(order: Sequence[object], parameters: Collection[str]) -> str | None:
    """Return what makes a saved order useless for these parameters, or None.

    >>> order_fault(["b", "a"], ["a", "b"])
    >>> order_fault(["b", "b"], ["a", "b"])
    "the order ['b', 'b'] does not name each of the 2 parameters once"
    """
    names = [name for name in order if isinstance(name, str)]
    if len(names) == len(order) and sorted(names) == sorted(parameters):
        return None
    return (
        f"the order {ascii(order)[:60]} does not name each of the {len(parameters)} parameters once"
    )
