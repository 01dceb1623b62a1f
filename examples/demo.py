"""Train the same GPT under several methods on a slow network: live progress, a table, a picture.

python examples/demo.py --algorithms "ddp,sgp" --rate 250mbit
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from demo_picture import draw
from rich.console import Console

from offbeat.compare import Plan, Session, line_up, network

SCRIPT = Path(__file__).with_name("char_gpt.py")
REPORTS = 15  # in each run
SAMPLE = 400  # characters

app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


@app.command()
def main(
    algorithms: Annotated[
        str, typer.Option(help="What to compare, by commas.")
    ] = "ddp,local_sgd(every=8),sgp(overlap=1)",
    nodes: Annotated[int, typer.Option(help="Emulated nodes, one worker each.")] = 4,
    rate: Annotated[
        str, typer.Option(help="What each node's link carries, both ways.")
    ] = "100mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 240,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo"),
) -> None:
    """Train one GPT under each algorithm and compare.

    As root, on emulated nodes behind slow links; else over loopback, and it says so.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # what is slow here are sockets: GPUs would pass them by
    )
    reports = (out / "reports.jsonl").absolute()
    settings = {"report-every": max(1, steps // REPORTS), "sample": SAMPLE, "out": reports}
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    methods, baseline = line_up(algorithms)
    plan = Plan(SCRIPT, methods, baseline, tuple(arguments), steps, rounds=1)
    session = Session(plan, out, console)
    with network(nodes, 1, rate) as (place, unshaped):
        session.carry_out(place, unshaped)
    comparison = session.write(report=True)
    assert comparison is not None, "all methods have run"
    draw(comparison, out / "loss.png")
    session.show(comparison)
    console.print(str(out / "loss.png"), soft_wrap=True)
    if any(run.failure for run in session.runs):
        raise typer.Exit(1)
    console.print(f"Written by the model of {methods[-1].text}:", style="bold", markup=False)
    console.print(sample(reports), markup=False, soft_wrap=True)


def sample(reports: Path) -> str:
    """The text that the last run's model has written."""
    lines = reports.read_text(encoding="utf-8").splitlines()
    return "".join(json.loads(line).get("sample", "") for line in lines)


if __name__ == "__main__":
    app()
