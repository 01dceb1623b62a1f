"""Sharing the optimizer in a node halves the time of an update.

Two nodes with four ranks each, LAMB on a transformer as for BERT in the paper, given gradients. The
update is timed with and without a partition in turns; of memory it is the peak.
"""

import time
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from char_gpt import CHARACTERS, GPT, cross_entropy
from pytorch_optimizer import Lamb

import offbeat
from bench.harness import GOAL, Bench, Claim, Effect, Result, command
from bench.harness.ranks import largest, on_nodes
from bench.harness.resident import forget_peak, resident, return_large_tensors

NODES, RANKS, MICRO_BATCH = 2, 4, 8
CONTEXT = 64
BATCHES = (4, 8, 16, 24)  # micro-batches
WARM_UP = 2  # updates that do not count
PLAIN, SPLIT = METHODS = ("adasum(within='local')", "adasum(partition=True)")
HEADINGS = ("algorithm", "moments a worker", "optimizer", "whole update",
            f"at most, micro-batch {MICRO_BATCH}", "micro-batch in this memory")  # fmt: skip
BENCH = Bench(name="adasum/partition", minutes=2, full_minutes=3, evidence="Table 1")


class Worker:
    """One rank's model under one algorithm, with LAMB; gradients are given."""

    def __init__(self, algorithm: str, width: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(width, 4, 4, CONTEXT)
        self.replica = offbeat.replicate(self.model, offbeat.algorithm(algorithm))
        self.replica.set_requires_sync(False)
        self.owned = self.replica.owned_parameters()
        self.optimizer = Lamb(self.owned, lr=1e-3)
        self.seconds: dict[str, list[float]] = {"optimizer": [], "update": []}

    def update(self, step: int) -> None:
        """Time the optimizer and all of the update, on the slowest rank."""
        random = torch.Generator().manual_seed(10 * step + self.replica.world.node)
        owned = {id(p) for p in self.owned}
        for p in self.model.parameters():  # drawn for all: the same on the ranks of a node
            grad = torch.randn(p.shape, generator=random)
            p.grad = grad if id(p) in owned else None
        dist.barrier()
        started = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.replica.step()
        for name, end in (("optimizer", stepped), ("update", time.perf_counter())):
            self.seconds[name].append(largest(end - started))

    def state_bytes(self) -> int:
        """Of the optimizer's moments, on the rank that has most."""
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return int(largest(sum(v.nbytes for v in states if isinstance(v, torch.Tensor))))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    workers = {text: Worker(text, case["width"]) for text in case["algorithms"]}
    for step in range(WARM_UP + case["steps"]):
        for worker in workers.values():
            worker.update(step)
    models = [[*worker.model.parameters()] for worker in workers.values()]
    found = {
        "seconds": {
            text: {kind: times[WARM_UP:] for kind, times in worker.seconds.items()}
            for text, worker in workers.items()
        },
        "bytes": {text: worker.state_bytes() for text, worker in workers.items()},
        "apart": max((a - b).abs().max().item() for a, b in zip(*models, strict=True)),
        "parameters": sum(p.numel() for p in models[0]),
    }
    for worker in workers.values():
        worker.replica.detach()
    return found


def peaks(case: dict[str, Any]) -> dict[str, list[float]]:
    """Bytes at most under each algorithm with each micro-batch, on the rank that takes most."""
    return_large_tensors()
    found = {}
    for text in case["algorithms"]:
        peak(text, case["width"], BATCHES[0])  # what is loaded or compiled at the first use
        found[text] = [peak(text, case["width"], batch) for batch in BATCHES]
    return found


def peak(algorithm: str, width: int, batch: int) -> float:
    """Bytes at most in some steps of training, beside those before the model was made."""
    dist.barrier()
    forget_peak()
    before = resident("VmRSS")
    model = GPT(width, 4, 4, CONTEXT)
    replica = offbeat.replicate(model, offbeat.algorithm(algorithm))
    optimizer = torch.optim.Adam(replica.owned_parameters(), lr=1e-3)
    for _ in range(4):
        tokens = torch.randint(len(CHARACTERS), (batch, CONTEXT + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        model.zero_grad()
        replica.step()
    most = largest(resident("VmHWM") - before)
    replica.detach()
    return most


def figures(found: dict[str, Any], method: str) -> dict[str, float]:
    """Bytes of the moments and at most, seconds, and the micro-batch that fits plain Adasum's."""
    middle = BATCHES.index(MICRO_BATCH)
    most, room = found["peaks"][method], found["peaks"][PLAIN][middle]
    slope, start = np.polyfit(BATCHES, most, 1)
    seconds = {kind: median(times) for kind, times in found["seconds"][method].items()}
    fits = float((room - start) / slope)
    return {"moments": found["bytes"][method], **seconds, "peak": most[middle], "fits": fits}


def claims(plain: dict[str, float], split: dict[str, float], apart: float) -> list[Claim]:
    times = {kind: plain[kind] / split[kind] for kind in plain}
    return [
        Claim.effect("an update takes less time", Effect(1.82 / 0.97, "x"),
                     Effect(times["update"], "x")),
        Claim("the optimizer takes less time", "", f"{times['optimizer']:.2f} x less",
              times["optimizer"] > 1.0, GOAL),
        Claim("a worker's moments take a quarter of the memory", "4 x less",
              f"{times['moments']:.2f} x less", times["moments"] >= 3.8, GOAL),
        Claim.effect("a larger micro-batch takes the same memory", Effect(36 / 22, "x"),
                     Effect(1 / times["fits"], "x")),
        Claim("the models are the same", "", f"apart by {apart:.1e}", apart < 1e-4, GOAL),
    ]  # fmt: skip


@command(
    BENCH, "--full", full={"width": 512}, width="Of the transformer.",
    rate="Of a node's link; none: no limit.",
)  # fmt: skip
def app(width: int = 256, rate: str | None = None) -> Result:
    case = {"algorithms": METHODS, "width": width, "steps": 20}
    found = on_nodes(measure, case, NODES, RANKS, rate)
    found["peaks"] = on_nodes(peaks, case, NODES, RANKS, rate)
    of = {method: figures(found, method) for method in METHODS}
    rows = [
        (method, f"{each['moments'] / 2**20:.1f} MiB", f"{each['optimizer']:.3f} s",
         f"{each['update']:.3f} s", f"{each['peak'] / 2**20:.0f} MiB", f"{each['fits']:.1f}")
        for method, each in of.items()
    ]  # fmt: skip
    parameters, where = found["parameters"] / 1e6, rate or "links not limited"
    title = f"{NODES} nodes, {RANKS} ranks each, {parameters:.1f} M parameters, {where}"
    judged = claims(of[PLAIN], of[SPLIT], found["apart"])
    return Result(title, HEADINGS, rows, judged, measured=found)
