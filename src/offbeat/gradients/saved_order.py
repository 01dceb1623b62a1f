"""The order of readiness in a saved state."""

from collections.abc import Collection, Sequence


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
