"""The program: its commands, and those that are short enough to live here."""

import inspect
import json
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import offbeat
from offbeat.cli import compare, doctor, lab, plan, store
from offbeat.kit.imports import quiet_imports
from offbeat.kit.terminal import exit_codes

EPILOG = """
Examples:

- offbeat recipes

- offbeat check "sgp(overlap=1, wire='bf16')"

- offbeat compare train.py --algorithms 'ddp,sgp(overlap=1)' --rate 250mbit --steps 60

- offbeat lab --nodes 4 --rate 250mbit -- python train.py

- offbeat plan train.py --nodes 4,64,1024 --rate 1gbit

- offbeat store --port 29400 --workers 4
"""

app = typer.Typer(
    help="Communication-efficient data-parallel training for PyTorch: Adasum, Stochastic Gradient "
    "Push, DASO, LAGS-SGD and Asynchronous Adam.",
    epilog=EPILOG,
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
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Declare the options of the program itself."""


@app.command(epilog="Example: offbeat recipes --json | jq '.[].name'")
def recipes(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the available algorithms, with their arguments and defaults.

    A recipe's text, such as local_sgd(every=4), is what offbeat.algorithm() and the --algorithms
    option of offbeat compare accept.
    """
    with quiet_imports():
        from offbeat.recipes import RECIPES
        from offbeat.recipes.auto import auto
    rows = [
        {
            "name": recipe.__name__,
            "signature": _signature(recipe),
            "summary": (inspect.getdoc(recipe) or "").splitlines()[0].replace("``", "`"),
        }
        for recipe in (*RECIPES, auto)
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("recipe", "description", show_lines=True)
    for row in rows:
        table.add_row(row["signature"], row["summary"])
    Console().print(table)


@app.command(epilog='Example: offbeat check "local_sgd(every=4)"')
def check(
    text: Annotated[
        str, typer.Argument(help="Text of an algorithm, for example local_sgd(every=4).")
    ],
) -> None:
    """Parse the text of an algorithm and print its exchanges; exit code 2 if it is invalid."""
    with quiet_imports():
        from offbeat.recipes import algorithm
    with exit_codes("interrupted"):
        made = algorithm(text)
        for candidate in made.auto.candidates if made.auto else ():
            algorithm(candidate)
        typer.echo(repr(made))


def _algorithm_environment(text: str) -> dict[str, str]:
    """Return the variable that offbeat.algorithm() reads; raises ValueError for a wrong text."""
    with quiet_imports():
        from offbeat.recipes import ALGORITHM_VARIABLE, algorithm
    algorithm(text)
    return {ALGORITHM_VARIABLE: text}


app.command(
    "lab", context_settings={**lab.SETTINGS, "obj": _algorithm_environment}, epilog=lab.EPILOG
)(lab.lab)
app.command("compare", epilog=compare.EPILOG)(compare.compare)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("store", epilog=store.EPILOG)(store.store)


def _signature(recipe: Callable[..., object]) -> str:
    parameters = inspect.signature(recipe).parameters.values()
    return f"{recipe.__name__}({', '.join(f'{p.name}={p.default!r}' for p in parameters)})"
