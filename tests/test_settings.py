"""Settings are checked against their annotations, with one form of error."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf, nan
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from offbeat.settings import above, at_least, between, check_settings, check_values, describe
from offbeat.topology import Ring, Topology


@dataclass(frozen=True, kw_only=True)
class Example:
    """One field for each kind of annotation."""

    flag: bool = False
    count: int = 1
    every: Annotated[int, at_least(1, "steps")] = 1
    rate: float = 0.1
    size: Annotated[float, above(0, "MiB")] = 25.0
    share: Annotated[float, between(0, 1, closed="right")] | Literal["adaptive"] = 0.5
    decay: Annotated[float, between(0, 1, closed="left")] = 0.9
    corner: Annotated[float, between(-1, 1)] = 0
    wait: Annotated[int, at_least(1)] | None = None
    scope: Literal["layer", "model"] = "layer"
    units: Literal["lr", "gradient"] | None = None
    wire: Literal["bf16"] | Annotated[None, "full precision"] = None
    graph: Topology = field(default_factory=Ring)
    hint: Annotated[Topology, "such as Ring()"] = field(default_factory=Ring)
    level: Literal[0, 1] = 0
    note: Any = None

    def __post_init__(self) -> None:
        check_settings(self)


GOOD = {
    "flag": [True, False],
    "count": [-3, 0, 10**400],
    "every": [1, 2, 10**9],
    "rate": [-0.5, 0, 3, np.float64(0.25)],
    "size": [1e-9, 1],
    "share": [1e-9, 1, "adaptive"],
    "decay": [0, 0.999],
    "corner": [-1, 1.0],
    "wait": [None, 1, 7],
    "scope": ["layer", "model"],
    "units": [None, "lr", "gradient"],
    "wire": [None, "bf16"],
    "graph": [Ring()],
    "level": [0, 1],
    "note": [None, "x", 3, torch.ones(2)],
}
WHOLE, NUMBER = "a whole number", "a number"
BAD: dict[str, tuple[str, list[Any]]] = {
    "flag": ("True or False", [0, 1, None, "True"]),
    "count": (WHOLE, [True, 1.0, "1", None, 2.5, 1j, torch.ones(1), np.ones(2)]),
    "every": (f"{WHOLE} of steps, 1 or more", [0, -1, True, 1.5, "3", None]),
    "rate": (NUMBER, [True, nan, inf, -inf, "1", None, 1j, torch.ones(2)]),
    "size": (f"{NUMBER} of MiB, more than 0", [0, -1.0, nan, inf, False]),
    "share": (f"{NUMBER} in (0, 1] or 'adaptive'", [0, 1.5, True, "adapt", None, nan]),
    "decay": (f"{NUMBER} in [0, 1)", [1, -0.1, nan, "0"]),
    "corner": (f"{NUMBER} in [-1, 1]", [1.5, -1.5, inf]),
    "wait": (f"None or {WHOLE}, 1 or more", [0, True, 1.5, "1"]),
    "scope": ("'layer' or 'model'", ["world", None, 1, ["layer"], torch.ones(2), np.ones(2)]),
    "units": ("None, 'lr' or 'gradient'", ["kg", 0, False]),
    "wire": ("None (full precision) or 'bf16'", ["fp8", torch.bfloat16]),
    "graph": ("a Topology", ["ring", Ring, None]),
    "hint": ("a Topology (such as Ring())", [5]),
    "level": ("0 or 1", [2, True, "0", None]),
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(GOOD), ids=repr)
def test_accepts(name: str, value: Any) -> None:
    assert getattr(Example(**{name: value}), name) is value


@pytest.mark.parametrize(
    ("name", "value"), cases({name: values for name, (_, values) in BAD.items()}), ids=repr
)
def test_refuses_with_name_value_and_what_was_expected(name: str, value: Any) -> None:
    message = f"{name}={value!r}, expected {BAD[name][0]}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Example(**{name: value})


def test_the_first_field_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"^count='a', expected"):
        Example(scope="x", count="a")  # type: ignore[arg-type]


def test_values_are_checked_against_a_signature() -> None:
    def train(moments: Literal["shared", "private"], lr: list[int], workers: int = 1) -> None:
        """Annotations of arguments that are not among the values need not be understood."""

    check_values(train, {"moments": "shared", "workers": 3})
    with pytest.raises(ValueError, match=r"^moments='own', expected 'shared' or 'private'$"):
        check_values(train, {"workers": 3, "moments": "own"})


def test_a_mapping_is_told_from_what_is_none() -> None:
    def train(sizes: int | Mapping[str, int]) -> None: ...

    check_values(train, {"sizes": {"head": 3}})
    with pytest.raises(ValueError, match=r"sizes=\[1\], expected a whole number or a mapping"):
        check_values(train, {"sizes": [1]})


def test_an_annotation_that_cannot_be_checked_is_an_error_of_the_class() -> None:
    def train(sizes: list[int]) -> None: ...

    with pytest.raises(TypeError, match=r"cannot check values against the annotation list\[int\]"):
        check_values(train, {"sizes": [1]})


def test_descriptions_of_callables_have_no_address() -> None:
    class Chosen:
        def __call__(self) -> int:
            return 1

    @dataclass(frozen=True)
    class Holder:
        first: Any
        second: Any = None

    assert describe(Holder(max, partial(max, 1, key=min))) == (
        "Holder(first=max, second=partial(max, 1, key=min))"
    )
    assert "0x" not in describe(Holder(Chosen(), lambda: 1))
