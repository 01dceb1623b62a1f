"""The command of a benchmark: it measures, and reports what it returns."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.report import report
from bench.harness.table import Row

OPTIONS = {  # what most benchmarks mean by an option of this name
    "nodes": "Emulated nodes.",
    "rate": "Of every node's link.",
    "steps": "Optimizer steps of each run.",
    "rounds": "Rounds of turns.",
    "seconds": "Of each method in each round.",
    "workers": "Virtual workers.",
    "seeds": "Runs of each method.",
}


@dataclass(frozen=True)
class Result:
    """What a benchmark has found; the arguments of :func:`bench.harness.report.report`."""

    title: str
    headings: Row
    rows: list[tuple[str, ...]]
    claims: list[Claim]
    measured: Any = None
    picture: Any = None
    raw: Any = None

    @classmethod
    def by_case(
        cls, title: str, headings: Row, found: Mapping[Any, Any],
        rows: Callable[..., Iterable[tuple[str, ...]]], claims: Callable[..., Iterable[Claim]],
    ) -> "Result":  # fmt: skip
        """The rows and claims of each case and what was found in it, one after the other."""
        lines, judged = (
            [line for case in found.items() for line in made(*case)] for made in (rows, claims)
        )
        return cls(title, headings, lines, judged, found)


def command(
    bench: Bench, *examples: str, **options: str
) -> Callable[[Callable[..., Result]], typer.Typer]:
    """Make a command of a function that measures; its parameters with defaults are the options.

    ``options`` describes those whose meaning is not that of ``OPTIONS``, ``examples`` are options
    that ``--help`` shows.
    """
    about = OPTIONS | options

    def decorate(measure: Callable[..., Result]) -> typer.Typer:
        def main(**given: Any) -> None:
            report(bench, **vars(measure(**given)))

        signature = inspect.signature(measure, eval_str=True)
        described = [
            each.replace(annotation=Annotated[each.annotation, _option(name, about[name])])
            for name, each in signature.parameters.items()
        ]
        main.__signature__ = signature.replace(parameters=described)  # type: ignore[attr-defined]
        main.__doc__ = measure.__doc__
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(epilog=bench.examples(*examples))(main)
        return app

    return decorate


def _option(name: str, about: str) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", help=about)


def numbers(text: str) -> list[int]:
    """The numbers of an option such as "4,8"."""
    return [int(number) for number in text.split(",")]
