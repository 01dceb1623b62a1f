"""Measurements as compact JSON: series of numbers become median, range and count."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from statistics import median
from typing import Any

KEPT = 3  # a series of at most so many numbers is written as it is
DIGITS = 7  # significant ones
DRAWN_DIGITS = 4  # of what a picture shows
WIDTH = 160  # columns of a line


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest and number of the values."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def plain(value: Any, digits: int | None = None, is_summarized: bool = False) -> Any:
    """The value as JSON allows it: keys are strings, dataclasses are dictionaries.

    Numbers keep so many significant digits, longer series of them become their summary.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if is_summarized and _is_series(value):
        value = summary(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each, digits, is_summarized) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, digits, is_summarized) for each in value]
    if isinstance(value, float) and digits is not None:
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def _is_series(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) > KEPT
    return is_list and all(_is_number(each) for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def dumps(value: Any, depth: int = 0) -> str:
    """Indented JSON in which a series, and whatever fits on a line, is on one line."""
    flat = json.dumps(value)
    if len(flat) + depth <= WIDTH or not isinstance(value, dict | list):
        return flat
    if _is_series(value):
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(k)}: {dumps(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(pad + dumps(v, depth + 1) for v in value) + "\n" + " " * depth + "]"
