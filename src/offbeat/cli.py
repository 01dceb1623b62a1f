"""The command line: ``offbeat``, or ``python -m offbeat``."""

import inspect
import json
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import offbeat
from offbeat.compare import command as compare_command
from offbeat.lab import command as lab_command
from offbeat.recipes import RECIPES

app = typer.Typer(
    help="Data-parallel training for PyTorch that does not wait for the slowest wire.",
    epilog="Example: offbeat recipes --json",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(offbeat.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command(epilog="Examples: offbeat recipes · offbeat recipes --json | jq '.[].name'")
def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the recipes: what to pass to offbeat.algorithm(), or to a script's --algorithm."""
    rows = [
        {
            "name": recipe.__name__,
            "signature": _signature(recipe),
            "summary": (inspect.getdoc(recipe) or "").splitlines()[0],
        }
        for recipe in RECIPES
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("recipe", "what it does", title="offbeat recipes")
    for row in rows:
        table.add_row(row["signature"], row["summary"])
    Console().print(table)


@app.command(epilog='Example: offbeat check "local_sgd(every=4)"')
def check(text: Annotated[str, typer.Argument(help="An algorithm as on a command line.")]) -> None:
    """Say what an algorithm's text stands for; exit code 2 if it is not valid."""
    try:
        typer.echo(offbeat.algorithm(text))
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


app.command("lab", context_settings=lab_command.SETTINGS, epilog=lab_command.EPILOG)(
    lab_command.lab
)
app.command("compare", epilog=compare_command.EPILOG)(compare_command.compare)


def _signature(recipe: Callable[..., offbeat.Algorithm]) -> str:
    parameters = inspect.signature(recipe).parameters.values()
    return f"{recipe.__name__}({', '.join(f'{p.name}={p.default!r}' for p in parameters)})"
