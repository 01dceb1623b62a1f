"""The density of each layer: one number for all, a number for each pattern of names, a function."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

OfLayer = Callable[[str, int], float]  # (name, numel): the share of its entries that is sent


def layer_densities(
    density: float | Mapping[str, float] | OfLayer, sizes: Mapping[str, int]
) -> dict[str, float]:
    """Return the density of each layer, by name.

    In a mapping a name comes before patterns (of :mod:`fnmatch`), and an earlier pattern before a
    later one. Raises ``ValueError`` for a key that matches no layer, a layer that no key matches,
    and a density outside (0, 1]. ``sizes`` are the numbers of entries.

    >>> sizes = {"embed.weight": 4000, "head.weight": 1000, "head.bias": 10}
    >>> layer_densities({"head.bias": 1.0, "head.*": 0.01, "*": 0.001}, sizes)
    {'embed.weight': 0.001, 'head.weight': 0.01, 'head.bias': 1.0}
    >>> layer_densities({"haed.*": 0.01, "*": 0.001}, sizes)
    Traceback (most recent call last):
    ValueError: density: 'haed.*' matches no parameter; the first of 3 are 'embed.weight', ...
    """
    if isinstance(density, Mapping):
        return _by_pattern(density, sizes)
    if callable(density):
        found = {name: density(name, numel) for name, numel in sizes.items()}
        for name, value in found.items():
            if not _is_share(value):
                raise ValueError(
                    f"density returned {value!r} for {name!r}, expected a number in (0, 1]"
                )
        return {name: float(value) for name, value in found.items()}
    return dict.fromkeys(sizes, float(density))


def mapping_fault(density: Mapping[Any, Any]) -> str | None:
    """Return what is wrong with a mapping whatever the layers, or None.

    >>> mapping_fault({"head.*": 2})
    "density={'head.*': 2}, expected a number in (0, 1] for each name or pattern"
    """
    if density and all(isinstance(key, str) and _is_share(v) for key, v in density.items()):
        return None
    return f"density={density!r}, expected a number in (0, 1] for each name or pattern"


def _by_pattern(density: Mapping[str, float], sizes: Mapping[str, int]) -> dict[str, float]:
    for key in density:
        if key not in sizes and not any(fnmatchcase(name, key) for name in sizes):
            shown = ", ".join(map(repr, list(sizes)[:3]))
            raise ValueError(
                f"density: {key!r} matches no parameter; the first of {len(sizes)} are {shown}"
            )
    return {name: float(density[_key_of(name, density)]) for name in sizes}


def _key_of(name: str, density: Mapping[str, float]) -> str:
    if name in density:
        return name
    if found := [key for key in density if fnmatchcase(name, key)]:
        return found[0]
    raise ValueError(
        f"density: no name or pattern matches parameter {name!r}; add a last pattern '*' for all "
        "others"
    )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def densities_fault(densities: Mapping[str, float]) -> str | None:
    """Return which saved densities cannot be, or None."""
    wrong = {name: density for name, density in densities.items() if not 0 < density <= 1}
    return f"the densities {ascii(wrong)[:60]} are not in (0, 1]" if wrong else None
