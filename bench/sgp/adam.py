"""Adam with SGP on a transformer, small and large batches (Figure 3 of the SGP paper).

The GPT of the examples instead of a translation model, held-out loss instead of BLEU, 8 nodes.
"""

from typing import Annotated

import typer

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.comparison import compare, figures, middle, seconds
from bench.harness.effect import Effect
from bench.harness.files import EXAMPLES
from bench.harness.report import report
from offbeat.compare import Comparison, Experiment, Result, parse_methods

SCRIPT = EXAMPLES / "char_gpt.py"
BATCHES = {"small": 2, "large": 8}  # windows of 64 characters for each node and step
PAPER = {"small": 2.0, "large": 1.5}  # how much faster SGP runs
BENCH = Bench(
    name="sgp/adam",
    claim="SGP with Adam on a transformer (Fig. 3)",
    minutes=3,
    full_minutes=20,
    evidence={"Fig. 3": "Faster with Adam on a transformer, and as much progress a step"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def train(batch: int, nodes: int, rate: str, steps: int) -> Comparison:
    """Train with all-reduce and with SGP."""
    arguments = ("--batch-size", str(batch), "--report-every", str(max(1, steps // 5)))
    methods, baseline = parse_methods("ddp,sgp")
    experiment = Experiment(SCRIPT, methods, baseline, arguments, steps, rounds=1)
    return compare(experiment, nodes, rate)


def loss(result: Result) -> float:
    return middle(result.heldout_loss)


def claims(size: str, comparison: Comparison) -> list[Claim]:
    ar, sgp = comparison.results
    faster = seconds(ar) / seconds(sgp)
    reached = [result.seconds_to_target for result in (ar, sgp)]
    in_time = [f"{each.median:.1f} s" if each else "never" for each in reached]
    return [
        Claim.effect(f"{size} batch: SGP runs faster", Effect(PAPER[size], "x"),
                     Effect(faster, "x")),
        Claim(f"{size} batch: SGP makes slightly more progress per step", "better",
              f"held-out loss {loss(sgp):.3f} against {loss(ar):.3f}", loss(sgp) < loss(ar)),
        Claim(f"{size} batch: SGP reaches the common loss sooner", "sooner",
              f"{in_time[1]} against {in_time[0]}",
              bool(reached[0] and reached[1] and reached[1].median < reached[0].median)),
    ]  # fmt: skip


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Ten times the steps.")] = False,
    nodes: Annotated[int, typer.Option(help="Emulated nodes.")] = 8,
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "50mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 50,
) -> None:
    """Train a GPT with Adam on 8 nodes, by all-reduce and by SGP."""
    rows, judged, found = [], [], {}
    for size, batch in BATCHES.items():
        comparison = train(batch, nodes, rate, steps * (10 if full else 1))
        for name, result in zip(("AR-Adam", "SGP-Adam"), comparison.results, strict=True):
            step = f"{seconds(result) * 1e3:.0f} ms"
            factor = f"{seconds(comparison.results[0]) / seconds(result):.2f}"
            paper = f"{PAPER[size]:.1f}" if name == "SGP-Adam" else "1.0"
            rows.append((size, name, step, paper, factor, f"{loss(result):.3f}"))
        judged += claims(size, comparison)
        found[size] = figures(comparison)
    headings = ("batch", "method", "a step", "paper, x AR", "ours, x AR", "held-out loss")
    title = f"Figure 3: Adam on a transformer, {nodes} nodes, {rate}"
    report(BENCH, title, headings, rows, judged, measured=found)


if __name__ == "__main__":
    app()
