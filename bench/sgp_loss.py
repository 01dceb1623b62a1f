"""A rank is lost, or late: how long the others wait, and what becomes of the training.

Lost: of 8 workers of `sgp(overlap=1, on_loss="continue")` one gets SIGKILL at a random step.
Late: of 4 workers one loses its link for 5 s, or has a quarter of its time to compute, by overlap.
All in the lab: real processes, a network for each, the store with the launcher. Needs root.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import offbeat
from offbeat.lab import Cut, Fault, Lab, Straggler

RESULTS = Path(__file__).parent / "results" / "sgp_loss.json"
RATE = "250mbit"
WORKERS, STEPS = 8, 300
LATE_WORKERS, LATE_STEPS, LATE_NODE = 4, 150, 1
CUT_AT, CUT_SECONDS, SHARE = 8.0, 5.0, 0.25  # ranks need some 5 s to start
WORK = 0.02  # seconds of computing in a step, of the CPU's time: a halted process has none
NEAR = 20  # steps over which a loss is averaged
console = Console(highlight=False)


@dataclass(frozen=True)
class Loss:
    """One run in which a rank was killed."""

    seed: int
    rank: int
    step: int
    seconds: float  # the longest step of a survivor: until training went on
    before: float  # mean training loss just before
    after: float  # and at the end
    apart: float  # largest difference between the survivors' models after finish()
    named: bool  # all survivors say who was lost, and from when on they went on


@dataclass(frozen=True)
class Lateness:
    """One run with a late node: how much longer the loops took than without it, in seconds."""

    fault: str
    overlap: int
    step: float  # seconds of an undisturbed step
    late_node: float
    others: float


def train(algorithm: str, steps: int, victim: int, fatal: int, seed: int) -> None:
    """What every rank runs; prints one line of JSON."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))
    teacher = torch.randn(64, 8) / 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    replica = offbeat.replicate(model, offbeat.algorithm(algorithm))
    torch.manual_seed(1000 * seed + rank)
    losses, times = [], [time.monotonic()]
    for step in range(steps):
        busy = time.process_time() + WORK
        x = torch.randn(32, 64)
        loss = (model(x) - x @ teacher).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        while time.process_time() < busy:
            pass
        if (rank, step) == (victim, fatal):
            os.kill(os.getpid(), signal.SIGKILL)
        replica.step()
        losses.append(loss.item())
        times.append(time.monotonic())
    replica.finish()
    model_sum = [p.double().sum().item() for p in model.parameters()]
    lost = replica.stats()["lost"]
    said = {"losses": losses, "times": times, "model": model_sum, "lost": lost}
    print(json.dumps(said))
    replica.detach()
    dist.destroy_process_group()


def run(
    workers: int, *arguments: object, faults: Sequence[Fault] = (), expected: int = 0
) -> dict[int, dict[str, Any]]:
    """Train in a lab; what each rank said."""
    lines: list[tuple[int | None, str]] = []
    command = [sys.executable, __file__, "--train", json.dumps(arguments)]
    with Lab(workers, rate=RATE) as lab:
        code = lab.run(
            command, faults=faults, keep_going=True, on_line=lambda *line: lines.append(line)
        )
    if code != expected:
        raise RuntimeError(f"exit code {code}, expected {expected}: {lines[-20:]}")
    return {rank: json.loads(line) for rank, line in lines if rank is not None and line[0] == "{"}


def lose(seed: int) -> Loss:
    """Kill one of the workers at a step that depends on the seed."""
    dice = random.Random(seed)
    victim, fatal = dice.randrange(WORKERS), dice.randrange(20, STEPS // 2)
    algorithm = "sgp(overlap=1, on_loss='continue')"
    said = run(WORKERS, algorithm, STEPS, victim, fatal, seed, expected=128 + signal.SIGKILL)
    assert sorted(said) == [rank for rank in range(WORKERS) if rank != victim]
    losses = np.mean([worker["losses"] for worker in said.values()], axis=0)
    models = np.array([worker["model"] for worker in said.values()])
    lost = [worker["lost"] for worker in said.values()]
    return Loss(
        seed,
        victim,
        fatal,
        max(float(np.diff(worker["times"]).max()) for worker in said.values()),
        float(losses[fatal - NEAR : fatal].mean()),
        float(losses[-NEAR:].mean()),
        float(np.ptp(models, axis=0).max()),
        all(each == lost[0] and [loss["rank"] for loss in each] == [victim] for each in lost),
    )


def delay(overlap: int) -> list[Lateness]:
    """Each fault against a run without."""
    faults = {
        "none": [],
        f"link down for {CUT_SECONDS:g} s": [Cut(LATE_NODE, CUT_AT, CUT_AT + CUT_SECONDS)],
        f"{SHARE:.0%} of the CPU": [Straggler(LATE_NODE, SHARE)],
    }
    took, steps = {}, {}
    for name, fault in faults.items():
        said = run(LATE_WORKERS, f"sgp(overlap={overlap})", LATE_STEPS, -1, 0, 0, faults=fault)
        seconds = {rank: worker["times"][-1] - worker["times"][0] for rank, worker in said.items()}
        late = seconds.pop(LATE_NODE)
        took[name] = late, max(seconds.values())
        steps[name] = float(np.median(np.diff(said[0]["times"])))
    base = took.pop("none")
    return [
        Lateness(name, overlap, steps["none"], late - base[0], others - base[1])
        for name, (late, others) in took.items()
    ]


def show_losses(losses: Sequence[Loss]) -> None:
    table = Table(
        "seed", "killed", "s until training went on", "loss before", "loss at the end", "equal",
        title=f"one of {WORKERS} workers killed, {STEPS} steps",
    )  # fmt: skip
    for loss in losses:
        seconds = f"{loss.seconds:.1f}"
        equal = "yes" if loss.named and loss.apart == 0 else "NO"
        values = f"{loss.before:.4f}", f"{loss.after:.4f}", equal
        table.add_row(str(loss.seed), f"rank {loss.rank} at {loss.step}", seconds, *values)
    console.print(table)


def show_delays(delays: Sequence[Lateness]) -> None:
    table = Table(
        "node 1 has its", "overlap", "undisturbed step", "node 1 is late by", "the others by",
        title=f"{LATE_WORKERS} workers, {LATE_STEPS} steps, {RATE}",
    )  # fmt: skip
    for each in delays:
        figures = f"{each.step * 1e3:.0f} ms", f"{each.late_node:.2f} s", f"{each.others:.2f} s"
        table.add_row(each.fault, str(each.overlap), *figures)
    console.print(table)


def main(
    seeds: Annotated[int, typer.Option(help="runs with a killed rank, 20 s each")] = 10,
    late: Annotated[bool, typer.Option(help="measure late nodes too, 3 minutes")] = True,
    train_: Annotated[str, typer.Option("--train", hidden=True)] = "",
) -> None:
    """Print both tables and write them as JSON."""
    if train_:
        train(*json.loads(train_))
        return
    losses = [lose(seed) for seed in range(seeds)]
    show_losses(losses)
    delays = [row for overlap in (0, 1, 4) for row in delay(overlap)] if late else []
    show_delays(delays)
    RESULTS.parent.mkdir(exist_ok=True)
    report = {"losses": [*map(asdict, losses)], "delays": [*map(asdict, delays)]}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
