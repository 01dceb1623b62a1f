"""What is compared, and in which order; checked before anything starts."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from offbeat.exchange import Algorithm
from offbeat.gradients import TorchDDP
from offbeat.recipes import algorithm


@final
@dataclass(frozen=True)
class Method:
    """An algorithm, and the text that names it: what is told apart are texts.

    >>> Method.parse("alone").is_floor
    True
    """

    text: str
    algorithm: Algorithm = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> "Method":
        """Read an algorithm's text; raises ValueError as :func:`offbeat.algorithm` does."""
        return cls(text, algorithm(text))

    @property
    def is_floor(self) -> bool:
        """Whether it exchanges nothing: what training costs without communication."""
        return self.algorithm == Algorithm()

    @property
    def knows_stall(self) -> bool:
        """Whether its waiting can be seen; torch waits inside backward, unseen."""
        return not isinstance(self.algorithm.gradients, TorchDDP)

    @property
    def slug(self) -> str:
        """Its text as the name of a folder."""
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.text).strip("-.")


@final
@dataclass(frozen=True)
class Turn:
    """One run: a method in a round, counted from 1."""

    round: int
    method: Method


@final
@dataclass(frozen=True)
class Experiment:
    """A script, and the methods that take turns with it."""

    script: Path
    methods: tuple[Method, ...]
    baseline: Method
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    rounds: int = 3
    target_loss: float | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without starting anything."""
        if not self.script.is_file():
            raise ValueError(
                f"script: got {str(self.script)!r}, which is no file; name a Python script that "
                "accepts --algorithm, for example: offbeat compare train.py --algorithms ddp,sgp"
            )
        for name, value in (("rounds", self.rounds), ("steps", self.steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, expected 1 or more")

    def turns(self) -> Iterator[Turn]:
        """All runs in their order: A B C A B C, since machines drift while we measure."""
        for number in range(1, self.rounds + 1):
            for method in self.methods:
                yield Turn(number, method)

    def command(self, method: Method) -> list[str]:
        """What every rank runs."""
        steps = [] if self.steps is None else ["--steps", str(self.steps)]
        chosen = ["--algorithm", method.text, *steps]
        return [sys.executable, str(self.script), *chosen, *self.arguments]


def split_algorithms(text: str) -> list[str]:
    """Cut at commas, but not inside of parentheses or quotes.

    >>> split_algorithms("ddp,local_sgd(every=8, within='local'),sgp")
    ['ddp', "local_sgd(every=8, within='local')", 'sgp']
    """
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def parse_methods(
    algorithms: str, baseline: str | None = None, compute_only: bool = False
) -> tuple[tuple[Method, ...], Method]:
    """The methods in the order of their turns, and the one that others are compared with.

    A baseline that is not among ``algorithms`` comes first, the floor of ``compute_only`` last.
    Raises ValueError for a text that is no algorithm, and for two that mean the same.

    >>> methods, baseline = parse_methods("ddp,sgp", baseline="torch-ddp", compute_only=True)
    >>> [method.text for method in methods], baseline.text
    (['torch-ddp', 'ddp', 'sgp', 'alone'], 'torch-ddp')
    """
    methods = [Method.parse(text) for text in split_algorithms(algorithms)]
    for index, method in enumerate(methods):
        for earlier in methods[:index]:
            if earlier.algorithm == method.algorithm:
                raise ValueError(
                    f"algorithms: {earlier.text!r} and {method.text!r} are the same; name each once"
                )
    against = methods[0] if baseline is None else _among(methods, Method.parse(baseline))
    if against not in methods:
        methods.insert(0, against)
    if compute_only and not any(method.is_floor for method in methods):
        methods.append(Method.parse("alone"))
    return tuple(methods), against


def _among(methods: list[Method], wanted: Method) -> Method:
    return next((m for m in methods if m.algorithm == wanted.algorithm), wanted)
