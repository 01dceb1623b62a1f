"""Periodic evaluation of a training run, with a progress bar and JSON lines."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import offbeat

COUNTERS = ("bytes_sent", "messages", "seconds_stalled")


class Journal:
    """Evaluate before the first step and every `args.report_every` steps; rank 0 writes.

    `evaluate` returns the held-out loss of this rank's share of the data. It is called inside
    `replica.consensus()`, on the average of all replicas. Time and traffic of evaluations are
    excluded from the records. All ranks must call every method.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        replica: offbeat.Replica,
        evaluate: Callable[[], Tensor],
    ) -> None:
        self.args, self.replica, self.evaluate = args, replica, evaluate
        self.losses: list[Tensor] = []
        self.aside = Counter(self.counters())  # traffic outside of steps
        self.out = Path(args.out) if args.out and is_first() else None
        if self.out:
            self.out.write_text("", encoding="utf-8")
        self.console = Console(highlight=False, quiet=not is_first())
        self.progress = Progress(console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task(args.algorithm, total=args.steps)
        self.progress.start()
        self.started = time.perf_counter()
        self.report(0)

    def take(self, loss: Tensor) -> None:
        """Record the training loss of a step."""
        self.losses.append(loss.detach())
        self.replica.report_loss(loss)

    def after(self, step: int) -> None:
        """Evaluate if a report is due after this step."""
        self.progress.update(self.task, completed=step)
        if step % self.args.report_every == 0 or step == self.args.steps:
            self.report(step)
        if step == self.args.steps:
            self.progress.stop()

    def report(self, step: int) -> None:
        """Evaluate, and write losses and counters averaged over the ranks."""
        row = {"train_loss": torch.stack(self.losses).mean().item()} if self.losses else {}
        self.losses.clear()
        paused, before = time.perf_counter(), self.counters()
        row |= {"seconds": paused - self.started}
        row |= {name: before[name] - self.aside[name] for name in before}
        with self.replica.consensus(), torch.no_grad():
            row["heldout_loss"] = self.evaluate().item()
        self.replica.report_loss(row["heldout_loss"], "heldout")
        self.write({"step": step} | mean_over_ranks(row) | self.distance())
        after = self.counters()
        self.aside.update({name: after[name] - before[name] for name in before})
        self.started += time.perf_counter() - paused

    def counters(self) -> dict[str, float]:
        """Return the replica's counters of traffic and stalled time since its creation."""
        total = self.replica.stats()["total"]
        return {name: total[name] for name in COUNTERS}

    def distance(self) -> dict[str, float]:
        """Return the distances of the replicas from their average."""
        distance = self.replica.consensus_distance()
        return {f"distance_{name}": value for name, value in distance.items()}

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to the file and print it."""
        if self.out:
            with self.out.open("a", encoding="utf-8") as file:
                print(json.dumps(record), file=file)
        self.console.print(described(record), markup=False, soft_wrap=True)


def is_first() -> bool:
    """Return whether this is rank 0."""
    return dist.get_rank() == 0


def mean_over_ranks(row: dict[str, float]) -> dict[str, float]:
    """Return `row` with each value averaged over the ranks."""
    values = torch.tensor(list(row.values()), dtype=torch.float64)
    if torch.cuda.is_available():
        values = values.cuda()
    dist.all_reduce(values)
    return dict(zip(row, (values / dist.get_world_size()).tolist(), strict=True))


def described(record: dict[str, Any]) -> str:
    """Format a record for the console."""
    if "sample" in record:
        return str(record["sample"])
    line = f"step {record['step']:5d} {record['seconds']:7.1f} s"
    if "train_loss" in record:
        line += f"  train {record['train_loss']:.3f}"
    line += f"  held-out {record['heldout_loss']:.3f}"
    line += f"  sent {record['bytes_sent'] / 1e6:.1f} MB"
    return line + f"  stalled {record['seconds_stalled']:.1f} s"
