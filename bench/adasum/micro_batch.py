"""Peak memory of a rank by the size of its micro-batch, with and without a partition."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import offbeat
from bench.harness.resident import forget_peak, resident, return_large_tensors

CONTEXT = 64
BATCHES = (4, 8, 16, 24)
Peaks = dict[str, list[float]]  # bytes for each of BATCHES, by algorithm


def peaks(case: dict[str, Any]) -> Peaks:
    """Train some steps of each algorithm with each micro-batch; the maximum over ranks."""
    return_large_tensors()
    found: Peaks = {}
    for text in case["algorithms"]:
        train(text, case, BATCHES[0])  # what is loaded or compiled at the first use
        found[text] = [train(text, case, batch) for batch in BATCHES]
    return found


def train(text: str, case: dict[str, Any], batch: int) -> float:
    """Bytes at most, beside those before the model was made."""
    from char_gpt import CHARACTERS, GPT, cross_entropy  # imported late: only ranks need it

    dist.barrier()
    forget_peak()
    before = resident("VmRSS")
    model = GPT(case["width"], case["depth"], 4, CONTEXT)
    replica = offbeat.replicate(model, offbeat.algorithm(text))
    optimizer = torch.optim.Adam(replica.owned_parameters(), lr=1e-3)
    for _ in range(4):
        tokens = torch.randint(len(CHARACTERS), (batch, CONTEXT + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        model.zero_grad()
        replica.step()
    most = torch.tensor(float(resident("VmHWM") - before))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    replica.detach()
    return float(most)


def fitting(found: list[float], room: float) -> float:
    """Return the micro-batch that takes ``room`` bytes, by a line through what was measured."""
    slope, start = np.polyfit(BATCHES, found, 1)
    return float((room - start) / slope)
