"""The declaration of a benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a benchmark tests and how long it takes.

    A module declares it as ``BENCH = Bench(...)`` with literal arguments, which
    :mod:`bench.harness.catalogue` reads without importing the module.
    """

    name: str  # folder/module
    claim: str  # what is tested, in one line
    minutes: float  # on two cores
    full_minutes: float | None = None  # with --full; None if there is no such option
    gpu: bool = False  # whether it runs on a GPU, and nowhere else
    evidence: Mapping[str, str] = field(default_factory=dict)  # what a table of the paper shows

    @property
    def module(self) -> str:
        """The module whose ``app`` is the command."""
        return f"bench.{self.name.replace('/', '.')}"

    def examples(self, *options: str) -> str:
        """The last line of ``--help``: the plain command, and one for each set of options."""
        commands = (f"`python -m bench one {self.name} {each}".rstrip() for each in ("", *options))
        return f"Examples: {', '.join(f'{each}`' for each in commands)}"
