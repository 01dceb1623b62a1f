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


def compact(value: Any) -> Any:
    """The value with every longer series of numbers replaced by its summary."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): compact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return compact(summary(value)) if _is_series(value) else [*map(compact, value)]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def drawn(value: Any) -> Any:
    """The value with its series whole and its numbers as precise as a picture shows them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): drawn(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(drawn, value)]
    return float(f"{value:.{DRAWN_DIGITS}g}") if isinstance(value, float) else value


def _is_series(values: Sequence[Any]) -> bool:
    return len(values) > KEPT and all(_is_number(value) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def dumps(value: Any, depth: int = 0) -> str:
    """Indented JSON in which a series, and whatever fits on a line, is on one line."""
    flat = json.dumps(value)
    if len(flat) + depth <= WIDTH or not isinstance(value, dict | list):
        return flat
    if isinstance(value, list) and _is_series(value):
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(k)}: {dumps(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(pad + dumps(v, depth + 1) for v in value) + "\n" + " " * depth + "]"
