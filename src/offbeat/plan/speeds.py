"""Passes over memory: how long each kernel of the methods takes for one value."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import final

import torch

from offbeat.functional import Segment, pack
from offbeat.functional.narrowing import narrow
from offbeat.kernels.dispatch import (
    adasum_passes,
    machine_code,
    push_sum_passes,
    top_k_of_blocks,
)

NUMEL = 2**22  # values, which no cache of a core holds
LAYER = 2**18  # values of a layer in which entries are selected
TRIES = 5


@final
@dataclass(frozen=True)
class Speeds:
    """Seconds for one float32 value in a pass of each kind.

    Attributes:
        copy: copy parameters into a message, or back.
        add: add one tensor to another, in place.
        fill: fill a gossip message and update the model for it.
        merge: add a gossip message to the model.
        select: find the largest entries of a layer.
        scatter: add one entry at a place of its own.
        products: multiply one pair of values in the inner products of Adasum.
        combine: multiply and add one value in its combination.
        narrow: round to 8 or 16 bits with error feedback.
    """

    copy: float
    add: float
    fill: float
    merge: float
    select: float
    scatter: float
    products: float
    combine: float
    narrow: float

    @classmethod
    def of_bandwidth(cls, bandwidth: float) -> "Speeds":
        """Estimate all passes from the bandwidth of the memory, in bytes per second.

        >>> Speeds.of_bandwidth(8e9).copy
        1e-09
        """
        word = 4 / bandwidth
        return cls(
            copy=2 * word,
            add=3 * word,
            fill=4 * word,
            merge=4 * word,
            select=word,
            scatter=32 * word,
            products=word / 2,
            combine=word,
            narrow=8 * word,
        )

    @classmethod
    def measure(cls) -> "Speeds":
        """Measure all passes on this machine by the kernels themselves, in a few seconds."""
        torch.manual_seed(0)
        a, b, c = (torch.randn(NUMEL) for _ in range(3))
        gossip, select = push_sum_passes(a.device), top_k_of_blocks(a.device)
        adasum = adasum_passes(a.device, machine_code(a.device) != "")
        blocks = [(i, i + LAYER, LAYER // 100) for i in range(0, NUMEL, LAYER)]
        rows, weights = torch.stack((a, b)), torch.ones(1, 2, dtype=torch.float64)
        whole, products = [Segment(0, 0, NUMEL)], torch.zeros(1, 2, 2, dtype=torch.float64)
        some = torch.randperm(NUMEL)[: NUMEL // 64]
        message = torch.zeros(2 * NUMEL, dtype=torch.uint8)
        return cls(
            copy=_seconds(lambda: pack([b], [a])),
            add=_seconds(lambda: a.add_(b, alpha=1e-3)),
            fill=_seconds(lambda: gossip.fill_messages([a], None, 1.0, [(0.5, 1, c)])),
            merge=_seconds(lambda: gossip.add_messages([a], None, 1.0, [(0.5, 1, c)], [b])),
            select=_seconds(lambda: select(a, blocks)),
            scatter=64 * _seconds(lambda: c.index_add_(0, some, a[: len(some)])),
            products=_seconds(lambda: adasum.add_gram(rows, whole, products)) / 3,
            combine=_seconds(lambda: adasum.combine_rows(rows, whole, weights, c)) / 2,
            narrow=_seconds(lambda: narrow(a, message, "bf16")),
        )

    def faster(self, factor: float) -> "Speeds":
        """Return the speeds of a device with ``factor`` times the bandwidth."""
        return Speeds(**{name: value / factor for name, value in asdict(self).items()})


def _seconds(work: Callable[[], object]) -> float:
    """Return the median time of ``work`` for one of ``NUMEL`` values."""
    times = []
    for _ in range(TRIES + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[1:]) / NUMEL
