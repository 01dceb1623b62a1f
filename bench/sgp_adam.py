"""Figure 3 of Stochastic Gradient Push: Adam on a transformer, small and large batches.

The GPT of the examples instead of a translation model, held-out loss instead of BLEU; 8 nodes as in
the paper, real processes on the lab's links.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from _claims import Claim, report
from rich.console import Console

from offbeat.compare import Comparison, Plan, Result, Session, line_up, network

SCRIPT = Path(__file__).parents[1] / "examples" / "char_gpt.py"
BATCHES = {"small": 2, "large": 8}  # windows of 64 characters for each node and step
PAPER = {"small": 2.0, "large": 1.5}  # how much faster SGP runs
EPILOG = "Examples: `python bench/sgp_adam.py`, `python bench/sgp_adam.py --full`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


def compare(batch: int, nodes: int, rate: str, steps: int) -> Comparison:
    """Train with all-reduce and with SGP."""
    arguments = ("--batch-size", str(batch), "--report-every", str(max(1, steps // 5)))
    methods, baseline = line_up("ddp,sgp")
    plan = Plan(SCRIPT, methods, baseline, arguments, steps, rounds=1)
    with tempfile.TemporaryDirectory() as name:
        session = Session(plan, Path(name), console)
        with network(nodes, 1, rate) as (place, unshaped):
            session.carry_out(place, unshaped)
        comparison = session.write(report=False)
    assert comparison is not None, "all methods have run"
    if failed := [result for result in comparison.results if result.state != "done"]:
        raise RuntimeError("\n".join(failed[0].last_lines))
    return comparison


def seconds(result: Result) -> float:
    return result.seconds_per_step.median if result.seconds_per_step else float("nan")


def loss(result: Result) -> float:
    return result.heldout_loss.median if result.heldout_loss else float("nan")


def claims(size: str, comparison: Comparison) -> list[Claim]:
    ar, sgp = comparison.results
    faster = seconds(ar) / seconds(sgp)
    reached = [result.seconds_to_target for result in (ar, sgp)]
    in_time = [f"{each.median:.1f} s" if each else "never" for each in reached]
    return [
        Claim(f"{size} batch: SGP runs faster", f"{PAPER[size]:.1f} x", f"{faster:.2f} x",
              faster > 1.1),
        Claim(f"{size} batch: SGP makes slightly more progress per step", "better",
              f"held-out loss {loss(sgp):.3f} against {loss(ar):.3f}", loss(sgp) < loss(ar)),
        Claim(f"{size} batch: SGP is sooner at the loss that both reach", "sooner",
              f"{in_time[1]} against {in_time[0]}",
              bool(reached[0] and reached[1] and reached[1].median < reached[0].median)),
    ]  # fmt: skip


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="Ten times the steps.")] = False,
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 8,
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "50mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 50,
) -> None:
    """Train a GPT with Adam on 8 nodes, by all-reduce and by SGP."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is slow here are sockets: GPUs pass them by
    rows, judged, found = [], [], {}
    for size, batch in BATCHES.items():
        comparison = compare(batch, nodes, rate, steps * (10 if full else 1))
        for name, result in zip(("AR-Adam", "SGP-Adam"), comparison.results, strict=True):
            step = f"{seconds(result) * 1e3:.0f} ms"
            factor = f"{seconds(comparison.results[0]) / seconds(result):.2f}"
            paper = f"{PAPER[size]:.1f}" if name == "SGP-Adam" else "1.0"
            rows.append((size, name, step, paper, factor, f"{loss(result):.3f}"))
        judged += claims(size, comparison)
        found[size] = json.loads(comparison.to_json())
    headings = ("batch", "method", "a step", "paper, x AR", "ours, x AR", "held-out loss")
    title = f"Figure 3: Adam on a transformer, {nodes} nodes, {rate}"
    report("sgp_adam", title, headings, rows, judged, comparisons=found)


if __name__ == "__main__":
    app()
