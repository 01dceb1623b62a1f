"""Ways to do the same, which take turns, so that other load on the machine is shared.

The speed of a shared machine changes over minutes, less so within a round. Ratios therefore are
those of one round, in the median over rounds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

Work = Callable[[], object]
Name = TypeVar("Name")


def seconds_of(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turns(
    ways: Mapping[Name, Work],
    rounds: int,
    warm_up: int = 0,
    clock: Callable[[Work], float] = seconds_of,
) -> dict[Name, list[float]]:
    """Seconds of each way in each round; those of the first ``warm_up`` rounds do not count."""
    found: dict[Name, list[float]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name in turn_of(list(ways), number):
            found[name].append(clock(ways[name]))
    return {name: spent[warm_up:] for name, spent in found.items()}


def turn_of(names: list[Name], number: int) -> list[Name]:
    """The order of a round: it alternates, so that a slow drift favours none."""
    return names[::-1] if number % 2 else names


def over(times: Sequence[float], others: Sequence[float]) -> float:
    """The ratio of two ways, the median over the rounds that both have run."""
    return median(a / b for a, b in zip(times, others, strict=False))
