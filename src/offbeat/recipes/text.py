"""Algorithms as text: on a command line, or in the environment variable OFFBEAT_ALGORITHM."""

import inspect
import os
import re
from collections.abc import Sequence

from offbeat.deprecation import current_names
from offbeat.exchange import Algorithm
from offbeat.recipes.auto import auto
from offbeat.recipes.composed import NAMED, compose
from offbeat.recipes.methods import RECIPES
from offbeat.settings import read_call

ALGORITHM_VARIABLE = "OFFBEAT_ALGORITHM"
_THEN = re.compile(r"\s*,\s*then\s+")
_PHASE = re.compile(r"(.+?)\s+(?:(until) step (\d+)|for (\d+) steps?)")


def algorithm(text: str | Algorithm | None = None) -> Algorithm:
    """Parse the text of a command line, a recipe with literal arguments, into an algorithm.

    Arguments are those of the recipe, and so is the one that may be positional. In the name
    hyphens may stand for underscores. Without ``text`` the environment variable OFFBEAT_ALGORITHM
    is read, which ``offbeat compare`` and ``offbeat lab --algorithm`` set. An algorithm is returned
    as it is.

    A schedule names algorithms one after the other, each but the last with its number of steps, or
    with the step of the run at which it ends: "ddp for 200 steps, then local_sgd(every=8)" is
    post-local SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD").

    A pair of exchanges that no recipe makes is the text of both, joined by a plus; and the
    ``repr()`` of an algorithm is text that makes it again, unless it holds functions.

    Raises ``ValueError`` if there is no text, with the valid names for an unknown recipe or
    argument, and with the number expected for too many positional arguments.

    >>> algorithm("local_sgd(every=4)") == algorithm("local-sgd(4)")
    True
    >>> print(algorithm("ddp for 200 steps, then local_sgd(every=4)"))
    ddp() until step 200, then local_sgd(every=4)
    >>> algorithm("TopK(density=0.01, over='local') + PushSum(over='node')").gradients.density
    0.01
    """
    if isinstance(text, Algorithm):
        return text
    if text is None:
        return _from_environment()
    if len(parts := _phases(str(text))) > 1:
        return _schedule(parts, str(text))
    head, *rest = str(text).strip().partition("(")
    if head.partition("+")[0].strip() in NAMED:
        return compose(str(text))
    # On a command line names may have hyphens: torch-ddp.
    call = "".join((head.replace("-", "_"), *rest))
    name, args, kwargs = read_call(call, "cannot read the algorithm", '"local_sgd(every=8)"')
    recipes = {recipe.__name__: recipe for recipe in (*RECIPES, auto)}
    if name not in recipes:
        raise ValueError(
            f"unknown algorithm {name!r} in {text!r}; expected one of {', '.join(recipes)}"
        )
    kwargs = current_names(recipes[name], kwargs)
    signature = inspect.signature(recipes[name])
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        many = f"positional arguments: got {len(args)}, expected at most {most}; name the others"
        raise ValueError(
            f"{text!r}: {many if len(args) > most else error}; the arguments of {name} are "
            f"{', '.join(signature.parameters)}"
        ) from None
    return recipes[name](*args, **kwargs)


def _phases(text: str) -> list[str]:
    """Split a schedule, but not one inside the arguments of a recipe."""
    parts, start = [], 0
    for match in _THEN.finditer(text):
        before = text[: match.start()]
        if before.count("(") == before.count(")"):
            parts.append(before[start:])
            start = match.end()
    return [*parts, text[start:]]


def _schedule(parts: Sequence[str], text: str) -> Algorithm:
    """Return the schedule of several algorithms, each but the last with its end."""
    found, end = [], 0
    for part in parts[:-1]:
        if (match := _PHASE.fullmatch(part.strip())) is None:
            raise ValueError(
                f"cannot read {part!r} in {text!r}; expected an algorithm and its steps, for "
                "example 'ddp for 200 steps, then local_sgd(every=8)'"
            )
        name, until, step, steps = match.groups()
        end = int(step) if until else end + int(steps)
        found.append((algorithm(name), end))
    then = algorithm(parts[-1])
    for first, step in reversed(found):
        then = first.until(step, then)
    return then


def _from_environment() -> Algorithm:
    if not (text := os.environ.get(ALGORITHM_VARIABLE)):
        raise ValueError(
            f"algorithm: got no text, and {ALGORITHM_VARIABLE} is not set; pass a text such as "
            "'ddp', or set the variable, as offbeat compare and offbeat lab --algorithm do"
        )
    try:
        return algorithm(text)
    except ValueError as error:
        raise ValueError(f"environment variable {ALGORITHM_VARIABLE}: {error}") from None
