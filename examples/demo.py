"""Compare methods on a slow network: one small GPT, four emulated nodes, five methods.

python examples/demo.py
"""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from char_gpt import GPT, loss_of
from demo_picture import draw
from demo_table import table, write_rows
from rich.console import Console

from offbeat.compare import Experiment, Method, Session, open_runner, parse_methods
from offbeat.testing import simulate

SCRIPT = Path(__file__).with_name("char_gpt.py")
REPORTS = 12  # evaluations in each run
# The peak learning rate is 1e-2, and half of it where that was better among these two.
LR_FOR = "adasum=5e-3,lags=5e-3"
METHODS = (
    "ddp",
    'adasum(wire="bf16")',
    'sgp(overlap=1, wire="bf16")',
    "lags(density=0.05, warmup=60)",
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
            help="Recipes to compare, the first one is the baseline. {steps} stands for --steps.",
        ),
    ] = ",".join(METHODS),
    nodes: Annotated[int, typer.Option(help="Number of emulated nodes, one rank each.")] = 4,
    rate: Annotated[
        str, typer.Option(help="Rate of each node's link, in each direction.")
    ] = "100mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 200,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo"),
) -> None:
    """Train one small GPT with each method and compare loss, time and traffic.

    All methods run the same number of steps, with a peak learning rate of 0.01, or 0.005 for adasum
    and lags.

    Emulated nodes require root and iproute2. Otherwise the ranks communicate over loopback, which
    is not rate-limited, and a notice is printed.

    Prints a table. Writes loss.png, demo.json (the table), compare.json (all measurements) and
    report.html. The exit code is 1 if a run failed, 2 for invalid options, 130 after Ctrl-C.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of one machine would bypass the slow links
    try:
        methods, baseline = parse_methods(algorithms.replace("{steps}", str(steps)))
        arguments = ("--report-every", str(max(1, steps // REPORTS)), "--lr-for", LR_FOR)
        experiment = Experiment(SCRIPT, methods, baseline, arguments, steps, rounds=1)
        session = Session(experiment, out, console)
        compile_kernels(methods, nodes)
        with open_runner(nodes, 1, rate) as (runner, unshaped):
            session.run(runner, unshaped)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; all ranks have been ended", err=True)
        raise typer.Exit(130) from None
    show(session)
    raise typer.Exit(1 if any(run.failure for run in session.runs) else 0)


def compile_kernels(methods: tuple[Method, ...], nodes: int) -> None:
    """Run two steps of each method in threads, so that no measured run compiles kernels.

    Numba caches the compiled kernels on disk.
    """
    console.print("Compiling kernels; not part of the measurement, cached for later runs.")

    def loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        text = torch.arange(1000) % 90
        return loss_of(model, text, torch.arange(8), 64)

    for method in methods if nodes > 1 else ():
        simulate(method.algorithm, lambda: GPT(128, 2, 4, 64), loss, steps=2, size=nodes)


def show(session: Session) -> None:
    """Write all files and print the table."""
    comparison = session.write(report=True)
    assert comparison is not None, "every method has been started"
    results = [result for result in comparison.results if result.course is not None]
    if results:
        draw(comparison, session.folder / "loss.png")
        write_rows(comparison, session.folder / "demo.json")
        console.print(table(comparison))
    for name in ("loss.png", "demo.json", "compare.json", "report.html"):
        if (path := session.folder / name).exists():
            console.print(str(path), markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
