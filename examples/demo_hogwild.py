"""Train one sparse logistic regression by asynchronous Adam with one worker and with two.

python examples/demo_hogwild.py
"""

import json
import time
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Annotated

import typer
from demo_picture import COLOURS, Line, below, figure, limit, panel
from demo_workers import Report, Run, fit, named
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from sparse_rows import Labels, Rows, generate

from offbeat.hogwild import AsyncAdamClassifier

EPILOG = """
Examples:

- python examples/demo_hogwild.py

- python examples/demo_hogwild.py --workers 1,2,4 --passes 30 --out demo/threads
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)


@app.command(epilog=EPILOG)
def main(
    workers: Annotated[
        str, typer.Option(metavar="N,M,...", help="Worker threads of each run.")
    ] = "1,2",
    rows: Annotated[int, typer.Option(min=100, help="Rows of the problem.")] = 400_000,
    features: Annotated[int, typer.Option(min=100, help="Features of the problem.")] = 1_000_000,
    nonzeros: Annotated[int, typer.Option(min=1, help="Non-zero features of a row.")] = 100,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the rows.")] = 14,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-4,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo/hogwild"),
) -> None:
    """Compare the training loss over seconds of one worker thread and of two.

    The workers update shared parameters and moments without locks. Data generation and kernel
    compilation are not timed.

    Prints a table. Writes loss.png and demo.json. The exit code is 2 for invalid options, 130
    after Ctrl-C.
    """
    counts = read_workers(workers)
    out.mkdir(parents=True, exist_ok=True)
    console.print("Compiling kernels; not part of the measurement, cached for later runs.")
    AsyncAdamClassifier(max_iter=1).fit(*generate(100, 100, 10))
    started = time.perf_counter()
    x, y = generate(rows, features, nonzeros)
    console.print(f"Generated the problem in {time.perf_counter() - started:.1f} s.")
    runs = run_all(x, y, counts, passes, lr)
    setup = {"rows": rows, "features": features, "nonzeros": nonzeros, "lr": lr}
    results = {"setup": setup, "runs": [asdict(run) for run in runs]}
    (out / "demo.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(runs, f"{rows:,} rows, {features:,} features", out / "loss.png")
    console.print(table(runs))
    for name in ("loss.png", "demo.json"):
        console.print(str(out / name), markup=False, soft_wrap=True)


def run_all(x: Rows, y: Labels, counts: list[int], passes: int, lr: float) -> list[Run]:
    """Train once for each number of workers; exit on errors and on Ctrl-C."""
    try:
        with bars() as progress:
            return [fit(x, y, n, passes, lr, reporter(progress, n, passes)) for n in counts]
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def read_workers(text: str) -> list[int]:
    """Parse the numbers of workers."""
    counts = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(counts) != len(text.split(",")) or min(counts) < 1:
        raise typer.BadParameter(f"got {text!r}, expected whole numbers such as 1,2", None)
    return counts


def bars() -> Progress:
    """Return progress bars, which are shown on a terminal only."""
    columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[state]}"))
    return Progress(*columns, console=console, disable=not console.is_terminal)


def reporter(progress: Progress, workers: int, passes: int) -> Report:
    """Return a function that shows the state of one run, as a bar or in lines."""
    task = progress.add_task(named(workers), total=passes, state="starting")

    def report(done: int, seconds: float, loss: float) -> None:
        state = f"pass {done}/{passes}  {seconds:.1f} s  loss {loss:.4f}"
        progress.update(task, completed=done, state=state)
        if not console.is_terminal:
            console.print(f"{named(workers)}  {state}")

    return report


def draw(runs: list[Run], problem: str, path: Path) -> None:
    """Write the training loss over seconds."""
    lines = [
        Line(f"{named(run.workers)}  {run.seconds[-1]:.1f} s", colour,
             [0.0, *run.seconds], [log(2), *run.loss])
        for run, colour in zip(runs, COLOURS * len(runs), strict=False)
    ]  # fmt: skip
    with figure(f"Asynchronous Adam, logistic regression, {problem}", 1, path) as drawn:
        limit(drawn.axes[0], lines, skip=0.0)
        panel(drawn.axes[0], lines, below)
        drawn.axes[0].set(title="mean training loss of each pass over seconds", xlabel="seconds")


def table(runs: list[Run]) -> Table:
    """Return the figures of all runs."""
    goal = max(run.loss[-1] for run in runs)
    made = Table(title="Asynchronous Adam", box=box.SIMPLE_HEAD)
    heads = ("", "s/pass", "speed-up", "updates/s", "training loss\nof the last pass",
             f"s to loss\n{goal:.4f}")  # fmt: skip
    for head in heads:
        made.add_column(head, justify="right")
    for run in runs:
        seconds, first = run.seconds[-1], runs[0].seconds[-1]
        made.add_row(
            named(run.workers),
            f"{seconds / len(run.loss):.3f}",
            f"{first / seconds:.2f} ×",
            f"{run.updates / seconds:,.0f}",
            f"{run.loss[-1]:.4f}",
            "–" if (to := run.seconds_to(goal)) is None else f"{to:.1f}",
        )
    return made


if __name__ == "__main__":
    app()
