"""Profiles from files, which may be written by hand."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.plan.profile import Parameter, Profile
from offbeat.plan.speeds import Speeds

_DTYPES = {"float64", "float32", "bfloat16", "float16"}
_EXAMPLE = (
    '{"parameters": [{"name": "w", "numel": 1000000}], "forward": 0.1, "backward": 0.2, '
    '"optimizer": 0.01, "bandwidth": 1e10}'
)


def read_profile(path: Path) -> Profile:
    """Read a profile that ``Profile.write`` has written, or that was written by hand.

    Raises ``ValueError`` with the field that is missing or wrong.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"profile: cannot read {str(path)!r} ({error}); expected JSON such as {_EXAMPLE}"
        ) from None
    return _parsed(found, f"profile {str(path)!r}")


def _parsed(found: Any, where: str) -> Profile:
    if not isinstance(found, dict):
        raise ValueError(f"{where}: got {type(found).__name__}, expected an object: {_EXAMPLE}")
    known = {"parameters", "forward", "backward", "optimizer", "speeds", "bandwidth", "spread"}
    _require_known(found, known | {"memory", "device"}, where)
    forward, backward, optimizer = (
        _number(found, name, where) for name in ("forward", "backward", "optimizer")
    )
    if forward + backward + optimizer == 0:
        raise ValueError(
            f'{where}: "forward", "backward" and "optimizer" are all 0, expected the seconds of a '
            "step on one rank"
        )
    listed = found.get("parameters")
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f'{where}: "parameters" is {listed!r}, expected a list of objects with name and numel, '
            'in the order of the model: [{"name": "w", "numel": 1000000}]'
        )
    parameters = [_parameter(each, index, where) for index, each in enumerate(listed)]
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{where}: parameter {twice!r} is listed twice; names must differ")
    speeds = _speeds(found, where)
    made = Profile.by_size(parameters, forward, backward, optimizer, speeds)
    if any("ready" in each for each in listed):
        late = [p.name for p in parameters if p.ready > backward * (1 + 1e-6)]
        if late:
            raise ValueError(
                f'{where}: "ready" of {late[0]!r} is after the end of backward, {backward} s; '
                "give seconds from the start of backward"
            )
        made = replace(made, parameters=tuple(parameters))
    memory = None if found.get("memory") is None else int(_number(found, "memory", where))
    device = found.get("device")
    if not isinstance(device, str | None):
        raise ValueError(f'{where}: "device" is {device!r}, expected a string such as "cpu"')
    return replace(made, spread=_spread(found, where), memory=memory, device=device)


def _spread(found: Mapping[str, Any], where: str) -> tuple[float, ...]:
    spread = found.get("spread", [])
    if not isinstance(spread, list):
        raise ValueError(
            f'{where}: "spread" is {spread!r}, expected a list of the times of single steps over '
            "their mean: [0.98, 1.02]"
        )
    return tuple(_positive(each, f'"spread"[{i}]', where) for i, each in enumerate(spread))


def _parameter(each: Any, index: int, where: str) -> Parameter:
    here = f"{where}, parameter {index}"
    if not isinstance(each, dict):
        raise ValueError(f'{here}: got {each!r}, expected {{"name": "w", "numel": 1000000}}')
    _require_known(each, {"name", "numel", "dtype", "ready"}, here)
    name, numel, dtype = each.get("name"), each.get("numel"), each.get("dtype", "float32")
    if not isinstance(name, str):
        raise ValueError(f'{here}: "name" is {name!r}, expected a string')
    if not isinstance(numel, int) or isinstance(numel, bool) or numel < 1:
        raise ValueError(f'{here}: "numel" is {numel!r}, expected a whole number, 1 or more')
    if dtype not in _DTYPES:
        raise ValueError(f'{here}: "dtype" is {dtype!r}, expected one of {sorted(_DTYPES)}')
    ready = _number(each, "ready", here) if "ready" in each else 0.0
    return Parameter(name, numel, dtype, ready)


def _speeds(found: Mapping[str, Any], where: str) -> Speeds:
    if "speeds" not in found:
        return Speeds.of_bandwidth(_positive(found.get("bandwidth"), '"bandwidth"', where))
    given, names = found["speeds"], set(Speeds.__dataclass_fields__)
    if not isinstance(given, dict) or set(given) != names:
        raise ValueError(
            f'{where}: "speeds" is {given!r}, expected an object with {sorted(names)}; or give '
            '"bandwidth", that of the memory in bytes per second, instead'
        )
    return Speeds(**{name: _number(given, name, f'{where}, "speeds"') for name in names})


def _require_known(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(found) - known):
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; expected {sorted(known)}")


def _number(found: Mapping[str, Any], name: str, where: str) -> float:
    value: Any = found.get(name)
    if not _is_number(value) or value < 0:
        raise ValueError(f'{where}: "{name}" is {value!r}, expected a number, 0 or more')
    return float(value)


def _positive(value: Any, name: str, where: str) -> float:
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{where}: {name} is {value!r}, expected a number above 0")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
