"""The decorator of all recipes."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from offbeat.exchange import Algorithm
from offbeat.settings import call_text

Arguments = ParamSpec("Arguments")


def recipe(make: Callable[Arguments, Algorithm]) -> Callable[Arguments, Algorithm]:
    """Let what ``make`` returns print as its call, without the arguments that are defaults.

    >>> @recipe
    ... def nothing(every: int = 1, note: str = "") -> Algorithm:
    ...     return Algorithm()
    >>> print(nothing(1, note="as before"))
    nothing(note='as before')
    """
    signature = inspect.signature(make)

    @wraps(make)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Algorithm:
        made = make(*args, **kwargs)
        text = call_text(make, signature.bind(*args, **kwargs).arguments)
        # Not an argument of Algorithm: a copy by dataclasses.replace() is of no recipe.
        object.__setattr__(made, "recipe", text)
        return made

    return call
