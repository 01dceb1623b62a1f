"""Validation of settings against the annotations of the class or function that declares them.

Also :func:`read_call`, which reads settings from the text of a command line.
"""

import ast
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from math import inf
from operator import le, lt
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

# Python 3.11's parser raises SystemError now and then when threads parse at the same time.
_parser = threading.Lock()


@dataclass(frozen=True)
class Interval:
    """An interval of numbers, as metadata of ``Annotated[int, ...]`` or ``float``."""

    holds: Callable[[float], bool]
    text: str  # what follows the type of the number in an error


def at_least(low: float, unit: str = "") -> Interval:
    """Return the interval [low, infinity).

    >>> at_least(1, "steps").text
    ' of steps, 1 or more'
    """
    return Interval(lambda value: value >= low, f"{_of(unit)}, {low} or more")


def above(low: float, unit: str = "") -> Interval:
    """Return the interval (low, infinity)."""
    return Interval(lambda value: value > low, f"{_of(unit)}, more than {low}")


def between(
    low: float, high: float, *, closed: Literal["both", "left", "right"] = "both"
) -> Interval:
    """Return the interval from ``low`` to ``high``, without the end that is not ``closed``.

    >>> between(0, 1, closed="right").text
    ' in (0, 1]'
    """
    opening, low_holds = ("(", lt) if closed == "right" else ("[", le)
    closing, high_holds = (")", lt) if closed == "left" else ("]", le)
    return Interval(
        lambda value: low_holds(low, value) and high_holds(value, high),
        f" in {opening}{low}, {high}{closing}",
    )


def _of(unit: str) -> str:
    return f" of {unit}" if unit else ""


def check_settings(settings: Any) -> None:
    """Check every field of a dataclass against its annotation; call it in ``__post_init__``.

    Supported annotations are ``bool``, ``int`` (not bool), ``float`` (int or float, finite, not
    bool), None, ``Literal``, ``Callable``, classes and ``Mapping`` (by ``isinstance``), ``Any``,
    and unions of these.
    ``Annotated`` adds an interval to a number, or a string that the error shows in parentheses.
    Constraints between several settings remain code in ``__post_init__``, after this call.

    Raises ``ValueError`` for the first invalid field, with its name, its value, and the values
    expected.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Average:
    ...     every: Annotated[int, at_least(1, "steps")] = 1
    ...     wire: Literal["bf16"] | Annotated[None, "full precision"] = None
    ...
    ...     def __post_init__(self) -> None:
    ...         check_settings(self)
    >>> Average(every=0)
    Traceback (most recent call last):
    ValueError: every=0, expected a whole number of steps, 1 or more
    >>> Average(wire="int8")
    Traceback (most recent call last):
    ValueError: wire='int8', expected None (full precision) or 'bf16'
    """
    names = [field.name for field in fields(settings)]
    check_values(type(settings), {name: getattr(settings, name) for name in names})


def describe(settings: Any) -> str:
    """Return the repr of a dataclass with functions and classes by name, without an address.

    Ranks compare the reprs of their settings, so these must be equal in all processes. A field
    with ``repr=False`` is shown where it is not the default: it is newer than saved states, which
    are compared with the repr, too.

    >>> @dataclass(frozen=True)
    ... class Mapped:
    ...     function: Callable[[int], int]
    >>> describe(Mapped(abs))
    'Mapped(function=abs)'
    """
    values = [(field, getattr(settings, field.name)) for field in fields(settings)]
    shown = [f"{f.name}={_without_address(v)}" for f, v in values if f.repr or v != f.default]
    return f"{type(settings).__name__}({', '.join(shown)})"


def call_text(called: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return a call as text, without the arguments that are defaults.

    >>> call_text(int.from_bytes, {"bytes": b"1", "byteorder": "big", "signed": True})
    "from_bytes(bytes=b'1', signed=True)"
    """
    parameters = inspect.signature(called).parameters
    shown = [
        f"{name}={_without_address(value)}"
        for name, value in arguments.items()
        if name not in parameters or repr(value) != repr(parameters[name].default)
    ]
    return f"{called.__name__}({', '.join(shown)})"


def check_values(annotated: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check values by name against the annotations of a class or function.

    For settings outside dataclasses: constructor arguments, entries of a parameter group.

    Raises ``ValueError`` as :func:`check_settings` does.

    >>> def train(lr: Annotated[float, above(0)], passes: int | None = None): ...
    >>> check_values(train, {"lr": 0.1})
    >>> check_values(train, {"passes": 2.5})
    Traceback (most recent call last):
    ValueError: passes=2.5, expected None or a whole number
    """
    hints = _hints(annotated)
    for name, value in values.items():
        choices = _choices(hints[name])
        if not any(choice.accepts(value) for choice in choices):
            *others, last = (choice.expected for choice in choices)
            expected = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"{name}={value!r}, expected {expected}")


def read_call(text: str, complaint: str, example: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return name, positional and named arguments of a call with literal arguments, as text.

    If it is no such call, the ``ValueError`` begins with ``complaint``.

    >>> read_call("sgp('ring', overlap=1)", "cannot read the algorithm", "'ddp()'")
    ('sgp', ['ring'], {'overlap': 1})
    """
    call = parse_expression(text)
    try:
        if isinstance(call, ast.Name):
            return call.id, [], {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            keywords = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
            if len(keywords) == len(call.keywords):
                return call.func.id, [ast.literal_eval(arg) for arg in call.args], keywords
    except (TypeError, ValueError):
        pass
    raise ValueError(
        f"{complaint} {text!r}; expected a name with literal arguments, for example {example}"
    )


def parse_expression(text: str) -> ast.expr | None:
    """Return the syntax tree of an expression; None if the text is none."""
    try:
        with _parser:
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _without_address(value: Any) -> str:
    if isinstance(value, partial):
        parts = [*map(_without_address, (value.func, *value.args))]
        parts += [f"{name}={_without_address(v)}" for name, v in value.keywords.items()]
        return f"partial({', '.join(parts)})"
    name = getattr(value, "__qualname__", None)
    if name is None and (callable(value) or " at 0x" in repr(value)):
        name = type(value).__qualname__
    return name or repr(value)


class _Choice(NamedTuple):
    """One alternative of an annotation: its text in an error, and the test of a value."""

    expected: str
    accepts: Callable[[Any], bool]


@cache  # get_type_hints takes tens of microseconds, and the hints of a class do not change
def _hints(annotated: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(annotated, include_extras=True)


@cache
def _choices(hint: Any) -> list[_Choice]:
    """Split an annotation into its alternatives, None first."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        members = sorted(arguments, key=lambda member: NoneType not in (member, *get_args(member)))
        return [choice for member in members for choice in _choices(member)]
    if origin is Literal:
        return [_literal(value) for value in arguments]
    if origin is Callable:
        return [_Choice("a callable", callable)]
    if origin is Annotated:
        inner, *metadata = arguments
        return _refine(inner, metadata)
    if origin is Mapping:  # what is in it remains code of the class
        return [_Choice("a mapping", lambda value: isinstance(value, Mapping))]
    return [_plain(hint)]


def _refine(hint: Any, metadata: list[Any]) -> list[_Choice]:
    """Add the intervals and remarks of an ``Annotated`` to the one alternative inside it."""
    (choice,) = _choices(hint)
    for extra in metadata:
        expected, accepts = choice
        if isinstance(extra, Interval):
            choice = _Choice(expected + extra.text, _inside(extra, accepts))
        elif isinstance(extra, str):
            choice = _Choice(f"{expected} ({extra})", accepts)
    return [choice]


def _inside(interval: Interval, accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: accepts(value) and interval.holds(value)


def _literal(allowed: Any) -> _Choice:
    # By type too: 1 == True, and comparing an array or a tensor with a string gives no bool.
    return _Choice(repr(allowed), lambda value: type(value) is type(allowed) and value == allowed)


def _plain(hint: Any) -> _Choice:
    """Return the test for an annotation without parts; ``hint`` must be a class, None or Any."""
    if hint in _BUILT_IN:
        return _BUILT_IN[hint]
    if not isinstance(hint, type):
        raise TypeError(f"cannot check values against the annotation {hint!r}")
    article = "an" if hint.__name__[0] in "AEIOU" else "a"
    return _Choice(f"{article} {hint.__name__}", lambda value: isinstance(value, hint))


_BUILT_IN = {
    Any: _Choice("anything", lambda value: True),
    NoneType: _Choice("None", lambda value: value is None),
    bool: _Choice("True or False", lambda value: isinstance(value, bool)),
    int: _Choice("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    float: _Choice(
        "a number",
        lambda v: isinstance(v, int | float) and not isinstance(v, bool) and -inf < v < inf,
    ),
}
