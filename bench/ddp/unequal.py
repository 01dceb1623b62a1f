"""Samples per second of four workers, one of them at half speed, with equal work and by speed.

Computing is one pause a step, which uses no core and grows with the batch.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from bench.harness import GOAL, Bench, Claim, Result, command
from bench.harness.ranks import on_nodes
from bench.harness.turns import over
from offbeat.data import ElasticSampler

WORKERS, SLOW, BATCH, MOST = 4, 1, 32, 64
PAUSE = 10e-3  # seconds of a sample
TURN = 8  # steps, a multiple of the intervals below
WINDOW = 8  # steps, as the intervals below
METHODS = "ddp", "sgp(overlap=1)", "local_sgd(every=8)", "diloco(every=8)"
KEPT = 0.95  # goal: of the sum of the speeds of all workers
EQUAL, BALANCED, STEPS = "equal", "by speed", "steps by speed"
HEADINGS = ("method", "batches", "of the slow one", "samples in a second", "of the sum of speeds")
BENCH = Bench(
    name="ddp/unequal",
    claim="Beside a worker at half speed, batches or steps by speed keep 95 % of the sum of speeds",
    minutes=5,
)


@dataclass(frozen=True)
class Speed:
    """Samples per second of all workers in each round; ``size``: the batch of the slow one."""

    method: str
    batches: str
    size: int
    samples: list[float]
    alone: list[float]  # the sum over workers, each by itself

    @property
    def kept(self) -> float:
        return over(self.samples, self.alone)

    @property
    def row(self) -> tuple[str, ...]:
        pace, kept = f"{median(self.samples):.0f}", f"{100 * self.kept:.1f} %"
        return self.method, self.batches, f"{self.size}", pace, kept


class Worker:
    """One rank under one method."""

    def __init__(self, method: str, **balance: Any) -> None:
        self.model = nn.Linear(256, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.replica = offbeat.replicate(self.model, offbeat.algorithm(method), weighted=True)
        self.sampler = ElasticSampler(2**40, BATCH, self.replica, **balance)
        self.batches = iter(self.sampler)
        self.cost = PAUSE * (2 if dist.get_rank() == SLOW else 1)

    def step(self) -> int:
        """Make a step; the size of its batch."""
        self.size = len(next(self.batches))
        self.replica.set_weight(self.size)
        time.sleep(self.cost * self.size)
        self.model(torch.ones(1, 256)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.replica.step()
        return self.size

    def turn(self, steps: int = TURN) -> tuple[float, float]:
        """Samples of all ranks in a second until the slowest has ended, and the sum of speeds."""
        dist.barrier()
        began = time.perf_counter()
        made, end = 0, self.replica.steps + steps
        while self.replica.steps < end:
            made += self.step()
        seconds = time.perf_counter() - began
        sums, longest = torch.tensor([made, made / seconds]), torch.tensor(seconds)
        dist.all_reduce(sums)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return (sums[0] / longest).item(), sums[1].item()

    def close(self) -> None:
        self.replica.finish()
        self.replica.detach()


def race(rounds: int) -> list[Speed]:
    """All methods, on every rank, in turns with workers that exchange nothing."""
    alone, found = Worker("alone"), []
    for method in METHODS:
        ways = {EQUAL: {}, BALANCED: {"most": MOST}}
        ways |= {STEPS: {"window": WINDOW}} if "every" in method else {}
        for name, balance in ways.items():
            worker = Worker(method, **balance)
            for _ in range(3):
                worker.turn()
                if name == BALANCED:
                    worker.sampler.balance()
            pairs = [(worker.turn()[0], alone.turn(TURN // 2)[1]) for _ in range(rounds)]
            size = torch.tensor(worker.size)
            dist.broadcast(size, SLOW)
            worker.close()
            samples, speeds = map(list, zip(*pairs, strict=True))
            found.append(Speed(method, name, int(size), samples, speeds))
            if dist.get_rank() == 0:
                print("  ".join(found[-1].row), flush=True)
    alone.close()
    return found


@command(BENCH)
def app(rounds: int = 5) -> Result:
    """Train with equal batches, and with those that ElasticSampler chooses."""
    found: list[Speed] = on_nodes(race, rounds, WORKERS)
    claims = []
    for each in found:
        if each.batches != EQUAL:
            text = f"{each.method}, {each.batches}: share of the sum of speeds that is kept"
            said, holds = f"{100 * each.kept:.1f} %", each.kept >= KEPT
            claims.append(Claim(text, f"at least {KEPT:.0%}", said, holds, GOAL))
    title = f"{WORKERS} workers, one at half speed, {BATCH} samples each on average"
    return Result(title, HEADINGS, [each.row for each in found], claims, found)
