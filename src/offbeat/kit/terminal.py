"""Terminals: lines, tables and exit codes."""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table


def print_line(console: Console, text: str) -> None:
    """Print text as it is: no markup, no colours, not folded."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def standard_output(width: int) -> Console:
    """Return the terminal; for a file, which has no width at which a table must fold, ``width``."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def figures(
    title: str,
    heads: Iterable[RenderableType],
    rows: Iterable[Sequence[RenderableType]],
    caption: str | None = None,
) -> Table:
    """Build a table of numbers: names in the first column, which has no head."""
    title, caption = escape(title), escape(caption or "") or None  # they may hold names of files
    table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


@contextlib.contextmanager
def exit_codes(interrupted: str) -> Iterator[None]:
    """Print an error in one line and exit: 2 for options, 1 for what has run, 130 for Ctrl-C."""
    try:
        yield
    except typer.Exit:  # a RuntimeError
        raise
    except (ValueError, ModuleNotFoundError, RuntimeError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1 if isinstance(error, RuntimeError) else 2) from None
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(128 + signal.SIGINT) from None


@contextlib.contextmanager
def terminable(end: Callable[[int], object]) -> Iterator[None]:
    """Call ``end`` with the number of SIGTERM or SIGHUP; it raises, so that contexts clean up."""

    def handle(number: int, frame: FrameType | None) -> None:
        end(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
