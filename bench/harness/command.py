"""The command of a benchmark: it measures, and reports what it returns."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.harness.catalogue import Bench
from bench.harness.files import console
from bench.harness.report import Result, report

OPTIONS = {  # what most benchmarks mean by an option of this name
    "nodes": "Emulated nodes.",
    "rate": "Of every node's link.",
    "steps": "Optimizer steps of each run.",
    "rounds": "Rounds of turns.",
    "seconds": "Of each method in each round.",
    "workers": "Virtual workers.",
    "seeds": "Runs of each method.",
    "samples": "Images seen by all workers.",
}


def command(
    bench: Bench, *examples: str, full: str | Mapping[str, Any] = "", **options: str
) -> Callable[[Callable[..., Result]], typer.Typer]:
    """Make a command of a function that measures; its parameters with defaults are the options.

    ``options`` describes those whose meaning is not that of ``OPTIONS``, ``examples`` are options
    that ``--help`` shows. ``full`` has the values of options that ``--full`` stands for, or
    describes it as an option of the function's own.
    """
    plain = f"python -m bench one {bench.name}"
    epilog = "Examples: " + ", ".join([f"`{plain}`", *(f"`{plain} {each}`" for each in examples)])
    values = full if isinstance(full, Mapping) else {}
    stands = "The same as " + " ".join(f"--{name} {value}" for name, value in values.items())
    about = OPTIONS | options | {"full": f"{stands}." if values else full}

    def decorate(measure: Callable[..., Result]) -> typer.Typer:
        def main(**given: Any) -> None:
            if values and given.pop("full"):
                given |= values
            shown = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            is_quiet = not console.is_terminal
            with Progress(*shown, console=console, transient=True, disable=is_quiet) as clock:
                clock.add_task(f"{bench.name}, about {bench.minutes:g} min by default")
                found = measure(**given)
            report(bench, found)

        signature = inspect.signature(measure, eval_str=True)
        parameters = [*signature.parameters.values()]
        if values:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter("full", kind, default=False, annotation=bool))
        described = [
            each.replace(annotation=Annotated[each.annotation, _option(each.name, about)])
            for each in parameters
        ]
        main.__signature__ = signature.replace(parameters=described)  # type: ignore[attr-defined]
        main.__doc__ = measure.__doc__ or sys.modules[measure.__module__].__doc__
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(epilog=epilog)(main)
        return app

    return decorate


def _option(name: str, about: Mapping[str, str]) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", help=about[name])


def numbers(text: str, least: int = 1) -> list[int]:
    """The numbers of an option such as "4,8", ``least`` or more of them."""
    found = [int(number) for number in text.split(",") if number.strip().isdecimal()]
    if len(found) < max(least, len(text.split(","))):
        raise typer.BadParameter(f"got {text!r}, expected {least} or more numbers, such as 4,8")
    return found
