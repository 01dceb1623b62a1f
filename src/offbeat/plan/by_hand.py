"""Profiles from files, which may be written by hand."""

import json
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar, final

from offbeat.plan.profile import Parameter, Profile
from offbeat.plan.speeds import Seconds, Speeds
from offbeat.settings import above, at_least, between, check_values

_EXAMPLE = (
    '{"parameters": [{"name": "w", "numel": 1000000}], "forward": 0.1, "backward": 0.2, '
    '"optimizer": 0.01, "bandwidth": 1e10}'
)

UNEVEN = 0.01  # by how much the mean of rounded times may differ from 1
MOST = 2**48  # values of a parameter

Kind = TypeVar("Kind")


@final
@dataclass
class _File:
    """The fields of a profile, with their defaults."""

    forward: Seconds
    backward: Seconds
    optimizer: Seconds
    parameters: Annotated[list, "in the order of the model"]  # type: ignore[type-arg]
    bandwidth: Annotated[float, above(0, "bytes per second")] | Annotated[None, "speeds"] = None
    speeds: dict | None = None  # type: ignore[type-arg]
    spread: Annotated[list, "of times of single steps over their mean"] | None = None  # type: ignore[type-arg]
    memory: Annotated[float, at_least(0, "bytes")] | None = None
    device: Annotated[str, 'such as "cpu"'] | None = None


@final
@dataclass
class _Layer:
    """The fields of a parameter."""

    name: str
    numel: Annotated[int, between(1, MOST)]
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    ready: Seconds = 0.0


def read_profile(path: Path) -> Profile:
    """Read a profile that ``Profile.write`` has written, or that was written by hand.

    Raises ``ValueError`` with the field that is missing or wrong.
    """
    where = f"profile {str(path)!r}"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"profile: cannot read {str(path)!r} ({error}); expected JSON such as {_EXAMPLE}"
        ) from None
    try:
        return _parsed(_checked(_File, found, _EXAMPLE))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _parsed(found: _File) -> Profile:
    forward, backward, optimizer = found.forward, found.backward, found.optimizer
    if forward + backward + optimizer == 0:
        raise ValueError(
            "forward, backward and optimizer are all 0, expected the seconds of a step on one rank"
        )
    if not found.parameters:
        raise ValueError('parameters=[], expected objects such as {"name": "w", "numel": 1000000}')
    layers = [_layer(each, index) for index, each in enumerate(found.parameters)]
    names = [layer.name for layer in layers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"parameter {twice[0]!r} is listed twice; names must differ")
    made = Profile.by_size(layers, forward, backward, optimizer, _speeds(found))
    if any("ready" in each for each in found.parameters):
        late = [layer.name for layer in layers if layer.ready > backward * (1 + 1e-6)]
        if late:
            raise ValueError(
                f"ready of {late[0]!r} is after the end of backward, {backward} s; give seconds "
                "from the start of backward"
            )
        made = replace(made, parameters=tuple(layers))
    spread = found.spread or ()
    if wrong := [each for each in spread if type(each) not in (int, float) or not 0 < each < inf]:
        raise ValueError(f"spread holds {wrong[0]!r}, expected numbers above 0")
    if spread and abs((mean := fmean(spread)) - 1) > UNEVEN:
        raise ValueError(f"spread has the mean {mean:g}, expected 1: divide times by their mean")
    memory = None if found.memory is None else int(found.memory)
    return replace(made, spread=tuple(map(float, spread)), memory=memory, device=found.device)


def _layer(given: Any, index: int) -> Parameter:
    try:
        return Parameter(**vars(_checked(_Layer, given, '{"name": "w", "numel": 1000000}')))
    except ValueError as error:
        raise ValueError(f"parameter {index}: {error}") from None


def _speeds(found: _File) -> Speeds:
    if found.speeds is not None:
        return _checked(Speeds, found.speeds, "seconds of a value in each pass")
    if found.bandwidth is None:
        raise ValueError(
            "bandwidth=None without speeds, expected that of the memory in bytes per second"
        )
    return Speeds.of_bandwidth(found.bandwidth)


def _checked(kind: type[Kind], given: Any, example: str) -> Kind:
    """Return the fields of an object of JSON; raise ``ValueError`` for one that is wrong."""
    if not isinstance(given, dict):
        raise ValueError(f"got {given!r}, expected an object: {example}")
    known = kind.__annotations__
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"unknown field {unknown[0]!r}; expected {sorted(known)}")
    values = {name: given.get(name, getattr(kind, name, None)) for name in known}
    check_values(kind, values)
    return kind(**values)
