"""What a step of Stochastic Gradient Push costs behind slow links, beside torch and decent-dp.

A GPT of 3.5 million parameters, one process a node of the lab. The floor of a method is a step
without communication or its bytes on the link, whichever takes longer.
"""

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from _claims import Claim, report
from rich.console import Console

from offbeat.compare import Comparison, Plan, Result, Session, line_up, network
from offbeat.compare.quantity import size
from offbeat.lab import Place

SCRIPT = Path(__file__).parents[1] / "examples" / "char_gpt.py"
RIVAL = Path(__file__).with_name("_decent_dp.py")
FP32, BF16 = "sgp(overlap=1)", "sgp(overlap=1,wire='bf16')"
ALGORITHMS = f"ddp,local_sgd(every=8),sgp,{FP32},{BF16}"
MODEL = ("--width", "256", "--depth", "4", "--context", "128", "--batch-size", "3")
NEAR = 0.30 / 0.243  # a sketch's steps with 16-bit messages and without any, 4 nodes
EPILOG = "Examples: `python bench/sgp_speed.py`, `python bench/sgp_speed.py --nodes 4 --steps 40`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


def compare(nodes: int, rate: str, steps: int, rounds: int) -> tuple[Comparison, float | None]:
    """All methods in turns, and the seconds per step of decent-dp."""
    methods, baseline = line_up(ALGORITHMS, baseline="torch-ddp", compute_only=True)
    arguments = (*MODEL, "--report-every", str(steps), "--windows", "8")
    plan = Plan(SCRIPT, methods, baseline, arguments, steps, rounds)
    with tempfile.TemporaryDirectory() as name:
        session = Session(plan, Path(name), console)
        with network(nodes, 1, rate) as (place, unshaped):
            session.carry_out(place, unshaped)
            rival = decent_dp(place, steps) if find_spec("decent_dp") else None
        comparison = session.write(report=False)
    assert comparison is not None, "all methods have run"
    if failed := [result for result in comparison.results if result.state != "done"]:
        raise RuntimeError("\n".join(failed[0].last_lines))
    return comparison, rival


def decent_dp(place: Place, steps: int) -> float:
    """Seconds per step."""
    console.print("decent-dp: started")
    printed: list[str] = []
    command = [sys.executable, str(RIVAL), "--steps", str(steps), *MODEL]
    if place.run(command, on_line=lambda rank, line: printed.append(line)):
        raise RuntimeError("decent-dp failed:\n" + "\n".join(printed[-15:]))
    console.print(f"decent-dp: {float(printed[-1]):.3f} s/step")
    return float(printed[-1])


def seconds(result: Result) -> float:
    return result.seconds_per_step.median if result.seconds_per_step else float("nan")


def rows(nodes: int, comparison: Comparison, rival: float | None) -> list[tuple[str, ...]]:
    """One line for each method."""
    baseline = next(seconds(r) for r in comparison.results if r.is_baseline)
    lines = []
    for result in comparison.results:
        share = f"{result.share_of_floor.median:.0%}" if result.share_of_floor else ""
        sent = size(result.bytes_per_step.median) if result.bytes_per_step else ""
        step = seconds(result)
        line = (f"{nodes}", result.name, f"{step:.3f} s", f"{baseline / step:.2f}", share, sent)
        lines.append(line)
    if rival is not None:
        line = (f"{nodes}", "decent-dp", f"{rival:.3f} s", f"{baseline / rival:.2f}", "", "")
        lines.append(line)
    return lines


def claims(nodes: int, comparison: Comparison, rival: float | None) -> list[Claim]:
    results = {result.name: result for result in comparison.results}
    share = results[FP32].share_of_floor
    over = 1 / share.median if share else float("nan")
    fp32, bf16, alone = seconds(results[FP32]), seconds(results[BF16]), seconds(results["alone"])
    made = [
        Claim(f"{nodes} nodes: overlap takes as long as the slower of computation and wire",
              "at most 1.03 x", f"{over:.2f} x", over <= 1.03),
        Claim(f"{nodes} nodes: with 16-bit messages a step is near computation",
              f"at most {NEAR:.2f} x (0.30 s against 0.243 s)",
              f"{bf16 / alone:.2f} x ({bf16:.3f} s against {alone:.3f} s)", bf16 <= NEAR * alone),
    ]  # fmt: skip
    if rival is not None:
        text = f"{nodes} nodes: overlap is faster than decent-dp"
        made.append(Claim(text, "faster", f"{fp32:.3f} s against {rival:.3f} s", fp32 < rival))
    return made


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="Three rounds, 40 steps.")] = False,
    nodes: Annotated[str, typer.Option(help="Numbers of emulated nodes.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 12,
) -> None:
    """Time SGP on a GPT behind slow links, with torch's DDP and decent-dp."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is slow here are sockets: GPUs pass them by
    if find_spec("decent_dp") is None:
        console.print("decent-dp is not installed: its row is left out")
    lines, judged, found = [], [], {}
    for count in map(int, nodes.split(",")):
        comparison, rival = compare(count, rate, 40 if full else steps, 3 if full else 1)
        lines += rows(count, comparison, rival)
        judged += claims(count, comparison, rival)
        found[count] = json.loads(comparison.to_json()) | {"decent_dp": rival}
    headings = ("nodes", "method", "a step", "x torch DDP", "floor / time", "sent a step")
    report("sgp_speed", f"A step of a GPT, {rate}", headings, lines, judged, comparisons=found)


if __name__ == "__main__":
    app()
