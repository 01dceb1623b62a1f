"""Seconds per step of SGP behind slow links, beside torch's DDP.

A GPT of 3.2 million parameters, one process per node. The floor of a method is a step without
communication or its bytes on the link, whichever takes longer.
"""

from typing import Annotated

import typer

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.comparison import compare, figures, seconds
from bench.harness.files import EXAMPLES
from bench.harness.report import report
from offbeat.compare import Comparison, Experiment, parse_methods
from offbeat.kit.quantity import size

SCRIPT = EXAMPLES / "char_gpt.py"
FP32, BF16 = "sgp(overlap=1)", "sgp(overlap=1,wire='bf16')"
ALGORITHMS = f"ddp,local_sgd(every=8),sgp,{FP32},{BF16}"
MODEL = ("--width", "256", "--depth", "4", "--context", "128", "--batch-size", "3")
NEAR = 0.30 / 0.243  # s per step of a prototype with 16-bit messages and with none, 4 nodes
BENCH = Bench(
    name="sgp/speed",
    claim="A step of SGP behind slow links",
    minutes=5,
    full_minutes=25,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure(nodes: int, rate: str, steps: int, rounds: int) -> Comparison:
    """All methods in turns."""
    methods, baseline = parse_methods(ALGORITHMS, baseline="torch-ddp", compute_only=True)
    arguments = (*MODEL, "--report-every", str(steps), "--windows", "8")
    experiment = Experiment(SCRIPT, methods, baseline, arguments, steps, rounds)
    return compare(experiment, nodes, rate)


def rows(nodes: int, comparison: Comparison) -> list[tuple[str, ...]]:
    """One line for each method."""
    baseline = next(seconds(r) for r in comparison.results if r.is_baseline)
    lines = []
    for result in comparison.results:
        share = f"{result.share_of_floor.median:.0%}" if result.share_of_floor else ""
        sent = size(result.bytes_per_step.median) if result.bytes_per_step else ""
        step = seconds(result)
        line = (f"{nodes}", result.name, f"{step:.3f} s", f"{baseline / step:.2f}", share, sent)
        lines.append(line)
    return lines


def claims(nodes: int, comparison: Comparison) -> list[Claim]:
    results = {result.name: result for result in comparison.results}
    share = results[FP32].share_of_floor
    over = 1 / share.median if share else float("nan")
    bf16, alone = seconds(results[BF16]), seconds(results["alone"])
    return [
        Claim(f"{nodes} nodes: overlap takes as long as the slower of computation and link",
              "at most 1.03 x", f"{over:.2f} x", over <= 1.03),
        Claim(f"{nodes} nodes: with 16-bit messages a step is near computation",
              f"at most {NEAR:.2f} x (0.30 s against 0.243 s)",
              f"{bf16 / alone:.2f} x ({bf16:.3f} s against {alone:.3f} s)", bf16 <= NEAR * alone),
    ]  # fmt: skip


@app.command(epilog=BENCH.examples("--nodes 4 --steps 40"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Three rounds, 40 steps.")] = False,
    nodes: Annotated[str, typer.Option(help="Numbers of emulated nodes.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 12,
) -> None:
    """Time SGP on a GPT behind slow links, beside torch's DDP."""
    lines, judged, found = [], [], {}
    for count in map(int, nodes.split(",")):
        comparison = measure(count, rate, 40 if full else steps, 3 if full else 1)
        lines += rows(count, comparison)
        judged += claims(count, comparison)
        found[count] = figures(comparison)
    headings = ("nodes", "method", "a step", "x torch DDP", "floor / time", "sent a step")
    report(BENCH, f"A step of a GPT, {rate}", headings, lines, judged, measured=found)


if __name__ == "__main__":
    app()
