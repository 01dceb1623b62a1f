"""The definition of a comparison: a script, the methods and the order of their runs."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import final

from offbeat.exchange import Algorithm
from offbeat.lab.faults import Straggler
from offbeat.methods import TorchDDP
from offbeat.recipes import algorithm


@final
@dataclass(frozen=True)
class Method:
    """Pairs an algorithm with the text it was parsed from. Methods compare by their text.

    >>> Method.parse("alone").is_floor
    True
    """

    text: str
    algorithm: Algorithm = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> "Method":
        """Parse the text of an algorithm; raises ValueError as :func:`offbeat.algorithm` does."""
        return cls(text, algorithm(text))

    @property
    def is_floor(self) -> bool:
        """Whether it exchanges nothing, so that its step time is that of computation alone."""
        return self.algorithm == Algorithm()

    @property
    def knows_stall(self) -> bool:
        """Whether its stall time is measured; DistributedDataParallel waits inside backward."""
        return not isinstance(self.algorithm.gradients, TorchDDP)

    @property
    def slug(self) -> str:
        """The text in characters that are safe in the name of a folder."""
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.text).strip("-.")


@final
@dataclass(frozen=True)
class Experiment:
    """Defines a comparison: a script and the methods that are run with it.

    Each method runs ``rounds`` times for ``steps`` optimizer steps (None: as many as the script
    chooses). Speed-ups are relative to ``baseline``. ``arguments`` are passed to the script.
    ``target_loss`` is the training loss for the time to loss (None: the highest final loss).
    ``env_only`` is for a script without the options ``--algorithm`` and ``--steps``: nothing is
    added to its command line. ``environment`` holds further variables of every rank;
    ``stragglers`` are slow nodes. Raises
    ValueError if the script does not exist, for a number of rounds or steps below 1, and for
    ``steps`` together with ``env_only``.
    """

    script: Path
    methods: tuple[Method, ...]
    baseline: Method
    arguments: tuple[str, ...] = ()
    steps: int | None = None
    rounds: int = 3
    target_loss: float | None = None
    env_only: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    stragglers: tuple[Straggler, ...] = ()

    def __post_init__(self) -> None:
        """Validate what can be validated before anything runs."""
        if not self.script.is_file():
            raise ValueError(
                f"script: got {str(self.script)!r}, which is not a file; pass a Python script, "
                "for example: offbeat compare train.py --algorithms ddp,sgp"
            )
        for name, value in (("rounds", self.rounds), ("steps", self.steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, expected 1 or more")
        if self.target_loss is not None and not isfinite(self.target_loss):
            raise ValueError(f"target loss: got {self.target_loss}, expected a number")
        if self.env_only and self.steps is not None:
            raise ValueError(
                f"steps: got {self.steps} with --env-only, which adds nothing to the command line "
                "of the script; remove --steps and pass the script's own option after --, for "
                f"example: -- --max_steps {self.steps}"
            )

    def run_order(self) -> Iterator[tuple[int, Method]]:
        """Yield the round, counted from 1, and the method of every run.

        The methods alternate (A B C A B C), since the speed of a machine varies over time.
        """
        for number in range(1, self.rounds + 1):
            for method in self.methods:
                yield number, method

    def command(self, method: Method) -> list[str]:
        """Return the command line that every rank runs."""
        steps = [] if self.steps is None else ["--steps", str(self.steps)]
        chosen = [] if self.env_only else ["--algorithm", method.text, *steps]
        return [sys.executable, str(self.script), *chosen, *self.arguments]


def split_algorithms(text: str) -> list[str]:
    """Split a list of algorithms at the commas outside parentheses, quotes and schedules.

    >>> split_algorithms("ddp,local_sgd(every=8, within='local'),sgp")
    ['ddp', "local_sgd(every=8, within='local')", 'sgp']
    >>> split_algorithms("ddp for 9 steps, then sgp,lags")
    ['ddp for 9 steps, then sgp', 'lags']
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
    found: list[str] = []
    for part in map(str.strip, parts):
        if part.startswith("then ") and found:
            found[-1] += f", {part}"
        else:
            found.append(part)
    return found


def parse_methods(
    algorithms: str, baseline: str | None = None, compute_only: bool = False
) -> tuple[tuple[Method, ...], Method]:
    """Parse a list of algorithms; return the methods in the order of their runs, and the baseline.

    The baseline defaults to the first method. A baseline that is not among ``algorithms`` is put
    first. ``compute_only`` appends ``alone``, which exchanges nothing. Raises ValueError for text
    that is not an algorithm, and for two texts with the same meaning.

    >>> methods, baseline = parse_methods("ddp,sgp", baseline="torch-ddp", compute_only=True)
    >>> [method.text for method in methods], baseline.text
    (['torch-ddp', 'ddp', 'sgp', 'alone'], 'torch-ddp')
    """
    methods = [Method.parse(text) for text in split_algorithms(algorithms)]
    for index, method in enumerate(methods):
        for earlier in methods[:index]:
            if earlier.algorithm == method.algorithm:
                raise ValueError(
                    f"algorithms: {earlier.text!r} and {method.text!r} are the same algorithm; "
                    "list each algorithm once"
                )
    against = methods[0] if baseline is None else Method.parse(baseline)
    against = next((m for m in methods if m.algorithm == against.algorithm), against)
    if against not in methods:
        methods.insert(0, against)
    if compute_only and not any(method.is_floor for method in methods):
        methods.append(Method.parse("alone"))
    return tuple(methods), against
