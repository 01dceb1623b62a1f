"""What recipes share: the text of their calls, and the argument ``within``."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Literal, ParamSpec

from offbeat.exchange import Algorithm
from offbeat.methods import Mean
from offbeat.settings import call_text, check_values

Arguments = ParamSpec("Arguments")
Within = Annotated[Literal["local"], "the ranks of a node"] | None


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


def levels(within: Within) -> tuple[Mean | None, Literal["world", "node"]]:
    """Return the exchange of gradients inside a node, if there is one, and who exchanges models.

    >>> levels("local")
    (Mean(over='local', wire=None, bucket_mb=25.0, partition=False), 'node')
    """
    check_values(levels, {"within": within})
    return (Mean(over="local"), "node") if within else (None, "world")
