"""Train the same GPT under several methods and compare: live progress, a table, a picture.

python examples/demo.py --algorithms "ddp(),sgp()"
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from demo_picture import draw
from demo_result import Record, save, summary, table
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SCRIPT = Path(__file__).with_name("char_gpt.py")
REPORTS = 20  # in each run
QUIET = 3.0  # seconds between lines where the output is no terminal

app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


@dataclass
class Run:
    """One training run, its files and what it has reported so far."""

    algorithm: str
    stem: Path
    records: list[Record] = field(default_factory=list)
    sample: str = ""
    wall_seconds: float = 0.0

    @property
    def journal(self) -> Path:
        """Its reports, as JSON lines."""
        return self.stem.with_suffix(".jsonl")

    @property
    def log(self) -> Path:
        """All that it printed."""
        return self.stem.with_suffix(".log")

    def read(self) -> bool:
        """Take in the reports written so far; whether there are new ones."""
        known = len(self.records)
        # The part behind the last line end is empty, or a report that is still being written.
        lines = self.journal.read_text(encoding="utf-8").split("\n")[:-1]
        reports = [json.loads(line) for line in lines]
        self.records = [report for report in reports if "step" in report]
        self.sample = "".join(report.get("sample", "") for report in reports)
        return len(self.records) > known


def split(algorithms: str) -> list[str]:
    """The algorithms of a list: commas inside parentheses belong to the algorithm."""
    parts, depth = [""], 0
    for character in algorithms:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def launch(run: Run, workers: int, steps: int) -> subprocess.Popen[bytes]:
    """Start the training script on `workers` processes of this machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = {
        "algorithm": run.algorithm,
        "steps": steps,
        "report-every": max(1, steps // REPORTS),
        "sample": 400,
        "out": run.journal,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    run.journal.write_text("", encoding="utf-8")
    with run.log.open("wb") as log:
        return subprocess.Popen(
            [*torchrun, f"--nproc-per-node={workers}", str(SCRIPT), *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(workers),
        )


def environment(workers: int) -> dict[str, str]:
    """One thread a worker; no GPU where there is not one for each."""
    enough = torch.cuda.device_count() >= workers
    hidden = {} if enough else {"CUDA_VISIBLE_DEVICES": ""}
    return {"OMP_NUM_THREADS": "1", **os.environ, **hidden}


def follow(run: Run, process: subprocess.Popen[bytes], progress: Progress) -> None:
    """Show a run's reports until it ends: on its bar, or as lines where there is no terminal."""
    task = progress.tasks[-1].id
    started = spoken = time.monotonic()
    running = True
    while running:
        time.sleep(0.2)
        running = process.poll() is None
        if run.read():
            last = run.records[-1]
            progress.update(task, completed=last["step"], loss=f"{last['heldout_loss']:.3f}")
        if not console.is_terminal and (time.monotonic() - spoken > QUIET or not running):
            spoken = time.monotonic()
            console.print(f"{spoken - started:5.0f} s  {run.algorithm:12s}  {state(run)}")
    run.wall_seconds = time.monotonic() - started


def state(run: Run) -> str:
    """How far a run is, in words."""
    if not run.records:
        return "starting the workers"
    last = run.records[-1]
    return f"step {last['step']:5d}  held-out loss {last['heldout_loss']:.3f}"


def last_words(log: Path) -> str:
    """The last lines that the workers printed, without torchrun's longer report of their end."""
    text = log.read_text(encoding="utf-8", errors="replace")
    said, *_ = re.split(r"(?m)^[EW]\d{4} .*torch/distributed/elastic/multiprocessing/api", text)
    return "\n".join((said.strip() or text).splitlines()[-20:])


def execute(run: Run, workers: int, steps: int, progress: Progress) -> None:
    """Run one training from start to end; a failure ends the demo with its last lines."""
    progress.add_task(run.algorithm, total=steps, loss="starting")
    process = launch(run, workers, steps)
    try:
        follow(run, process, progress)
    finally:
        process.terminate()  # does nothing to a process that has ended
        process.wait()
    if process.returncode != 0:
        progress.stop()
        console.print(last_words(run.log), markup=False, soft_wrap=True)
        console.print(f"{run.algorithm} failed with status {process.returncode}; see {run.log}")
        raise typer.Exit(1)


@app.command()
def main(
    workers: Annotated[int, typer.Option(help="Processes on this machine.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 600,
    algorithms: Annotated[str, typer.Option(help="What to compare, by commas.")] = "ddp(),sgp()",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo"),
) -> None:
    """Train one GPT under each algorithm and compare."""
    out.mkdir(parents=True, exist_ok=True)
    runs = [Run(name, out / slug(name)) for name in split(algorithms)]
    console.print(f"{', '.join(run.algorithm for run in runs)}: {steps} steps, {workers} workers")
    columns = ("{task.description}", "loss {task.fields[loss]}")
    with Progress(
        SpinnerColumn(),
        TextColumn(columns[0]),
        BarColumn(),
        TextColumn(columns[1]),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        for run in runs:
            execute(run, workers, steps, progress)
    conclude(runs, workers, out)


def slug(algorithm: str) -> str:
    """A file name for an algorithm."""
    return re.sub(r"\W+", "-", algorithm).strip("-")


def conclude(runs: list[Run], workers: int, out: Path) -> None:
    """Write the files; show the table, a sample and where everything lies."""
    figures = {run.algorithm: summary(run.records, run.wall_seconds) for run in runs}
    curves = {run.algorithm: run.records for run in runs}
    save(figures, curves, workers, out / "result.json")
    draw(curves, workers, out / "loss.png")
    console.print(table(figures))
    console.print(f"Written by the model of {runs[-1].algorithm}:", style="bold")
    console.print(runs[-1].sample, markup=False, soft_wrap=True)
    for name in ("loss.png", "result.json"):
        console.print(f"{name:12s} {out / name}")


if __name__ == "__main__":
    app()
