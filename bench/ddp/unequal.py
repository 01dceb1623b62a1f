"""Beside a worker at half speed, batches or steps by speed keep 95 % of the sum of speeds."""

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from bench.harness import GOAL, Bench, Result, at_least, command
from bench.harness.ranks import on_nodes
from bench.harness.turns import over
from offbeat.data import ElasticSampler

WORKERS, SLOW, BATCH, MOST = 4, 1, 32, 64
PAUSE = 10e-3  # seconds of a sample: computing is one pause a step, which uses no core
TURN = WINDOW = 8  # steps, a multiple of the intervals below
METHODS = "ddp", "sgp(overlap=1)", "local_sgd(every=8)", "diloco(every=8)"
EQUAL, BALANCED, STEPS = "equal", "by speed", "steps by speed"
HEADINGS = ("method", "batches", "of the slow one", "samples in a second", "of the sum of speeds")
BENCH = Bench(name="ddp/unequal", minutes=5)


class Worker:
    """One rank under one method."""

    def __init__(self, method: str, **balance: Any) -> None:
        self.model = nn.Linear(256, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.replica = offbeat.replicate(self.model, offbeat.algorithm(method), weighted=True)
        self.sampler = ElasticSampler(2**40, BATCH, self.replica, **balance)
        self.batches = iter(self.sampler)
        self.cost = PAUSE * (2 if dist.get_rank() == SLOW else 1)

    def turn(self, steps: int = TURN) -> tuple[float, float]:
        """Samples of all ranks in a second until the slowest has ended, and the sum of speeds."""
        dist.barrier()
        began, made, end = time.perf_counter(), 0, self.replica.steps + steps
        while self.replica.steps < end:
            self.size = len(next(self.batches))
            made += self.size
            self.replica.set_weight(self.size)
            time.sleep(self.cost * self.size)
            self.model(torch.ones(1, 256)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.replica.step()
        seconds = time.perf_counter() - began
        sums, longest = torch.tensor([made, made / seconds]), torch.tensor(seconds)
        dist.all_reduce(sums)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return (sums[0] / longest).item(), sums[1].item()

    def close(self) -> None:
        self.replica.finish()
        self.replica.detach()


def race(rounds: int) -> list[dict[str, Any]]:
    """All methods, on every rank, in turns with workers that exchange nothing.

    Samples of all workers in a second in each round, and the sum over workers, each by itself.
    """
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
            samples, speeds = zip(*pairs, strict=True)
            about = {"method": method, "batches": name, "size": int(size)}
            found.append(about | {"samples": samples, "alone": speeds})
    alone.close()
    return found


@command(BENCH)
def app(rounds: int = 5) -> Result:
    """Train with equal batches, and with those that ElasticSampler chooses."""
    rows, claims, found = [], [], on_nodes(race, rounds, WORKERS)
    for each in found:
        way, kept = (each["method"], each["batches"]), over(each["samples"], each["alone"])
        pace = f"{median(each['samples']):.0f}"
        rows.append((*way, f"{each['size']}", pace, f"{100 * kept:.1f} %"))
        if each["batches"] != EQUAL:
            text = f"{', '.join(way)}: share of the sum of speeds that is kept"
            claims.append(at_least(text, kept, 0.95, "{:.1%}", source=GOAL))
    title = f"{WORKERS} workers, one at half speed, {BATCH} samples each on average"
    return Result(title, HEADINGS, rows, claims, found)
