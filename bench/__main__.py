"""The command line of the benchmarks: ``python -m bench``."""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from bench.harness import Bench, console, evidence, page
from bench.harness.catalogue import benches, select
from bench.harness.execute import execute

RUN = "Run one: `python -m bench run sgp/speed`; a folder: `run sgp`; all: `run --all`."
EXAMPLES = (
    "Examples: `python -m bench`, `python -m bench run ddp/overhead lags`, "
    "`python -m bench run --all --full`, `python -m bench one sgp/speed --nodes 4`"
)
app = typer.Typer(
    help="List and run the benchmarks, and write their tables into the documentation.",
    epilog=EXAMPLES,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """List and run the benchmarks, and write their tables into the documentation."""
    if context.invoked_subcommand is None:
        show()


@app.command(name="list")
def show() -> None:
    """List all benchmarks, what each tests and how many minutes it takes."""
    table = Table("name", "what it tests", box=None, padding=(0, 1, 0, 0))
    table.add_column("min", justify="right")
    table.add_column("full", justify="right")
    for bench in benches():
        full = "" if bench.full_minutes is None else f"{bench.full_minutes:g}"
        table.add_row(bench.name, escape(bench.claim), f"{bench.minutes:g}", full)
    console.print(table)
    console.print(f"\nMinutes on two cores, with --full in the last column. {RUN}", markup=False)


@app.command(epilog="Examples: `python -m bench run sgp/speed`, `run sgp daso`, `run --all`")
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Benchmarks or folders.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run all benchmarks.")] = False,
    full: Annotated[bool, typer.Option("--full", help="More steps, rounds or seeds.")] = False,
) -> None:
    """Run benchmarks one after the other, then write their tables into the documentation.

    One that fails does not stop the others; the exit code is then 1.
    """
    chosen = benches() if everything else _selected(names or [])
    if not chosen:
        raise typer.BadParameter(f"no benchmark was named. {RUN}")
    codes = execute(chosen, full)
    tables()
    if failed := [name for name, code in codes.items() if code]:
        console.print(f"failed: {', '.join(failed)}")
    if failed or len(codes) < len(chosen):
        raise typer.Exit(1)


@app.command(
    add_help_option=False,  # the benchmark has its own
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Examples: `python -m bench one sgp/speed --help`, `one sgp/speed --nodes 4`",
)
def one(context: typer.Context, name: Annotated[str, typer.Argument()]) -> None:
    """Run one benchmark with options of its own, in this process."""
    bench, *more = _selected([name])
    if more:
        raise typer.BadParameter(f"got a folder, {name!r}; `python -m bench run` runs all of it")
    import_module(bench.module).app(context.args, prog_name=f"python -m bench one {bench.name}")


@app.command(
    name="evidence",
    epilog="Examples: `python -m bench evidence --since 2026-11-20`, `--only-table`",
)
def prove(
    again: Annotated[bool, typer.Option("--again", help="Run those with a result too.")] = False,
    since: Annotated[str, typer.Option(help="Run those with a result from before a date.")] = "",
    only_table: Annotated[bool, typer.Option("--only-table", help="Run nothing.")] = False,
) -> None:
    """Run the benchmarks behind the papers' claims, and write their verdicts into docs/evidence.md.

    Those that have a result are not run, so that an interrupted run goes on where it was.
    """
    due = [] if only_table else evidence.due(since, again)
    codes = execute(due) if due else {}
    tables()
    found = evidence.collect()
    shown = Table("paper", "claim", "verdict", box=None, padding=(0, 1, 0, 0))
    for each in found:
        shown.add_row(each.where, each.text, each.verdict)
    console.print(shown)
    console.print(evidence.counted(found))
    if len(codes) < len(due) or any(codes.values()):
        raise typer.Exit(1)


@app.command(epilog="Examples: `python -m bench tables`")
def tables() -> None:
    """Write the tables of the documentation from bench/results."""
    written = ", ".join(os.path.relpath(path) for path in page.rewrite())
    console.print(f"tables written: {written}" if written else "the tables are up to date")


def _selected(names: Sequence[str]) -> list[Bench]:
    try:
        return select(names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
