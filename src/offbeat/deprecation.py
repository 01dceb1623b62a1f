"""Renamed arguments, which warn for one minor version."""

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from offbeat.version import __version__

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def renamed(
    since: str, **former: str
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Let a function accept arguments by their former names, given as ``former="name"``.

    Until the minor version ``since`` has ended, each use is a FutureWarning; from the next one on
    it is a ``ValueError``. Both name the argument to use. The decorator is then removed.

    >>> @renamed("999.0", size="count")
    ... def draw(count: int) -> int:
    ...     return count
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(draw(size=3), caught[0].message)
    3 draw: size= is now count=; the former name is an error from version 999.1 on
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            return function(*args, **current_names(call, kwargs))

        vars(call)["former_names"] = since, former
        return call

    return decorate


def current_names(function: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``function`` by the names that it has now."""
    since, former = vars(function).get("former_names", ("", {}))
    return {
        _warned(function.__name__, name, former[name], since) if name in former else name: value
        for name, value in named.items()
    }


def _warned(function: str, name: str, now: str, since: str) -> str:
    """Return ``now``; warn, or raise ``ValueError`` in versions after ``since``."""
    major, minor = _minor(since)
    if _minor(__version__) > (major, minor):
        raise ValueError(f"{function}: {name}= is now {now}=, since version {since}; write {now}=")
    text = f"{function}: {name}= is now {now}=; the former name is an error from version "
    warnings.warn(f"{text}{major}.{minor + 1} on", FutureWarning, stacklevel=5)
    return now


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
