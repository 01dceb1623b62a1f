"""Compare methods on a slow network: one small GPT, four emulated nodes, five methods.

python examples/demo.py
"""

import json
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import torch
import typer
from demo_picture import draw
from demo_table import table, write_rows
from rich.console import Console
from torch import Tensor, nn

from offbeat import algorithm
from offbeat.compare import Experiment, Session, open_runner, parse_methods
from offbeat.compare.experiment import split_algorithms
from offbeat.lab import Runner
from offbeat.testing import simulate

SCRIPT = Path(__file__).with_name("char_gpt.py")
REPORTS = 12  # evaluations in each run
PROBE = 60  # steps of the runs that measure how long a step takes
# The peak learning rate is 1e-2, and half of it where that was better among these two.
LR = {"adasum": 5e-3, "lags": 5e-3}
METHODS = (
    "ddp",
    'adasum(wire="bf16")',
    'sgp(overlap=1, wire="bf16")',
    "lags(density=0.05, warmup={fifth})",
    "daso(every=8, total_steps={steps})",
)
EPILOG = """
Examples:

- python examples/demo.py

- python examples/demo.py --rate 250mbit --steps 400

- python examples/demo.py --algorithms 'ddp,local_sgd(every=8),d_psgd' --out demo/local
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)


@app.command(epilog=EPILOG)
def main(
    algorithms: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Recipes to compare, the first one is the baseline. {steps}: those of its run, "
            "{fifth}: a fifth of them.",
        ),
    ] = ",".join(METHODS),
    nodes: Annotated[int, typer.Option(help="Number of emulated nodes, one rank each.")] = 4,
    rate: Annotated[
        str, typer.Option(help="Rate of each node's link, in each direction.")
    ] = "100mbit",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of the baseline.")] = 150,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo"),
) -> None:
    """Train one small GPT with each method for the time that the baseline takes.

    Short runs measure how long a step takes with each method. Then each makes as many steps as fit
    into the time of the baseline's --steps, and its learning rate schedule is stretched over them.
    The peak learning rate is 0.01, or 0.005 for adasum and lags.

    Emulated nodes require root and iproute2. Otherwise the ranks communicate over loopback, which
    is not rate-limited, and a notice is printed.

    Prints a table. Writes loss.png, demo.json (the table), compare.json (all measurements) and
    report.html. The exit code is 1 if a run failed, 2 for invalid options, 130 after Ctrl-C.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of one machine would bypass the slow links
    try:
        texts = split_algorithms(algorithms)
        with open_runner(nodes, 1, rate) as (runner, unshaped):
            probe = session_of([(text, min(PROBE, steps)) for text in texts], out / "probe")
            compile_kernels(texts)
            console.print("Short runs, which measure how long a step takes:")
            counts = steps_of_equal_time(run(probe, runner, unshaped), steps)
            session = session_of(list(zip(texts, counts, strict=True)), out)
            console.print("Runs of about equal time:")
            run(session, runner, unshaped)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; all ranks have been ended", err=True)
        raise typer.Exit(130) from None
    show(session)


def compile_kernels(texts: list[str]) -> None:
    """Train something small with each method: what is compiled on the way is kept on disk.

    Methods that cannot train in threads, such as torch_ddp, compile nothing.
    """

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(torch.ones(1, 64)).square().mean()

    for text, steps in filled((text, 4) for text in texts):
        with warnings.catch_warnings(action="ignore"), suppress(ValueError):  # of short runs
            simulate(algorithm(text), lambda: nn.Linear(64, 64), loss, steps=steps, size=2)


def filled(runs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Fill the number of steps, and a fifth of it, into the texts of methods."""
    return [
        (text.replace("{steps}", str(steps)).replace("{fifth}", str(max(1, steps // 5))), steps)
        for text, steps in runs
    ]


def session_of(runs: list[tuple[str, int]], folder: Path) -> Session:
    """Prepare a run of each algorithm for its number of steps."""
    given = filled(runs)
    methods, baseline = parse_methods(",".join(text for text, _ in given))
    options = {
        text: {
            "steps": steps,
            "report_every": max(1, steps // REPORTS),
            "lr": LR.get(text.partition("(")[0], 1e-2),
        }
        for text, steps in given
    }
    arguments = ("--options-for", json.dumps(options))
    return Session(Experiment(SCRIPT, methods, baseline, arguments, rounds=1), folder, console)


def run(session: Session, runner: Runner, unshaped: str | None) -> Session:
    """Run all methods; exit with code 1 if one fails."""
    session.run(runner, unshaped)
    if any(run.failure for run in session.runs):
        show(session)
        raise typer.Exit(1)
    return session


def steps_of_equal_time(probe: Session, steps: int) -> list[int]:
    """Return how many steps of each method take as long as ``steps`` of the first.

    Phases of a method are shares of its run, so that a short run has as much of each; its first
    step, in which ranks connect, is left out.
    """
    comparison = probe.write(report=False)
    assert comparison is not None, "every method has been run"
    seconds = []
    for result in comparison.results:
        assert result.course is not None, "every method has been run"
        first, *_, last = result.course.smooth
        seconds.append((last.seconds - first.seconds) / (last.step - first.step))
    return [max(1, round(steps * seconds[0] / each)) for each in seconds]


def show(session: Session) -> None:
    """Write all files and print the table."""
    comparison = session.write(report=True)
    assert comparison is not None, "every method has been started"
    if any(result.course is not None for result in comparison.results):
        draw(comparison, session.folder / "loss.png")
        write_rows(comparison, session.folder / "demo.json")
        console.print(table(comparison))
    for name in ("loss.png", "demo.json", "compare.json", "report.html"):
        if (path := session.folder / name).exists():
            console.print(str(path), markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
