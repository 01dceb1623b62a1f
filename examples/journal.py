"""How an example reports: a progress bar or plain lines for people, JSON lines for programs."""

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
    """Reports at the start and every `args.report_every` steps; all ranks take part, rank 0 writes.

    `evaluate` gives this rank's part of the held-out loss; it is called while the model holds the
    average of all replicas. The clock stops during reports, and what they send is not counted.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        replica: offbeat.Replica,
        evaluate: Callable[[], Tensor],
    ) -> None:
        self.args, self.replica, self.evaluate = args, replica, evaluate
        self.losses: list[Tensor] = []
        self.aside = Counter(self.counters())  # what belongs to no step: attaching and reporting
        self.out = Path(args.out) if args.out and leads() else None
        if self.out:
            self.out.write_text("", encoding="utf-8")
        self.console = Console(highlight=False, quiet=not leads())
        self.progress = Progress(console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task(args.algorithm, total=args.steps)
        self.progress.start()
        self.started = time.perf_counter()
        self.report(0)

    def take(self, loss: Tensor) -> None:
        """Take note of a step's loss."""
        self.losses.append(loss.detach())
        self.replica.report_loss(loss)

    def after(self, step: int) -> None:
        """Report when it is time."""
        self.progress.update(self.task, completed=step)
        if step % self.args.report_every == 0 or step == self.args.steps:
            self.report(step)
        if step == self.args.steps:
            self.progress.stop()

    def report(self, step: int) -> None:
        """Write one record: losses and counters as means over the ranks."""
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
        """What the replica sent and how long it waited, ever."""
        total = self.replica.stats()["total"]
        return {name: total[name] for name in COUNTERS}

    def distance(self) -> dict[str, float]:
        """How far the replicas are from their average."""
        distance = self.replica.consensus_distance()
        return {f"distance_{name}": value for name, value in distance.items()}

    def write(self, record: dict[str, Any]) -> None:
        """Add a record to the file and show it."""
        if self.out:
            with self.out.open("a", encoding="utf-8") as file:
                print(json.dumps(record), file=file)
        self.console.print(described(record), markup=False, soft_wrap=True)


def leads() -> bool:
    """Whether this is rank 0."""
    return dist.get_rank() == 0


def mean_over_ranks(row: dict[str, float]) -> dict[str, float]:
    """`row` with each value averaged over the ranks."""
    values = torch.tensor(list(row.values()), dtype=torch.float64)
    if torch.cuda.is_available():
        values = values.cuda()
    dist.all_reduce(values)
    return dict(zip(row, (values / dist.get_world_size()).tolist(), strict=True))


def described(record: dict[str, Any]) -> str:
    """A record in words."""
    if "sample" in record:
        return str(record["sample"])
    line = f"step {record['step']:5d} {record['seconds']:7.1f} s"
    if "train_loss" in record:
        line += f"  train {record['train_loss']:.3f}"
    line += f"  held-out {record['heldout_loss']:.3f}"
    line += f"  sent {record['bytes_sent'] / 1e6:.1f} MB"
    return line + f"  waited {record['seconds_stalled']:.1f} s"
