"""Growth over size: one measurement at several sizes, and the power that it follows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from bench.harness.files import console
from bench.harness.report import Row

Found = TypeVar("Found")


def sweep(
    cases: Iterable[tuple[Any, ...]], measure: Callable[..., Found], row: Callable[[Found], Row]
) -> list[Found]:
    """Measure case by case; the row of each is printed as soon as it is there."""
    found = []
    for case in cases:
        found.append(measure(*case))
        console.print("  ".join(row(found[-1])), style="dim", markup=False)
    return found


def exponent(sizes: Sequence[float], figures: Sequence[float]) -> float:
    """The exponent a of figures ~ size^a."""
    return float(np.polyfit(np.log(sizes), np.log(figures), 1)[0])
