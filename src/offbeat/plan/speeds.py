"""Passes over memory: how long each kernel of the methods takes for one value."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, final

import torch

from offbeat.functional import Segment, pack
from offbeat.kernels.dispatch import (
    adasum_passes,
    machine_code,
    narrowing_on,
    push_sum_passes,
    top_k_of_blocks,
)
from offbeat.platform.device import wait_for_stream
from offbeat.settings import at_least

NUMEL = 2**22  # values, which no cache of a core holds
MORE = 16  # times as many on an accelerator: its caches are larger, and each pass is a launch
LAYER = 2**18  # values of a layer in which entries are selected
TRIES = 5
Seconds = Annotated[float, at_least(0, "seconds")]


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

    copy: Seconds
    add: Seconds
    fill: Seconds
    merge: Seconds
    select: Seconds
    scatter: Seconds
    products: Seconds
    combine: Seconds
    narrow: Seconds

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
    def measure(cls, device: str = "cpu") -> "Speeds":
        """Measure all passes on a device of this machine by the kernels themselves, in seconds."""
        place, numel = torch.device(device), NUMEL if device == "cpu" else MORE * NUMEL
        torch.manual_seed(0)
        a, b, c = (torch.randn(numel, device=place) for _ in range(3))
        gossip, select, narrow = push_sum_passes(place), top_k_of_blocks(place), narrowing_on(place)
        adasum = adasum_passes(place, machine_code(place) != "")
        blocks = [(i, i + LAYER, LAYER // 100) for i in range(0, numel, LAYER)]
        rows, whole = torch.stack((a, b)), [Segment(0, 0, numel)]
        weights = torch.ones(1, 2, dtype=torch.float64, device=place)
        products = torch.zeros(1, 2, 2, dtype=torch.float64, device=place)
        some = torch.randperm(numel, device=place)[: numel // 64]
        message = torch.zeros(2 * numel, dtype=torch.uint8, device=place)

        def seconds(work: Callable[[], object]) -> float:
            return _seconds(work, place) / numel

        return cls(
            copy=seconds(lambda: pack([b], [a])),
            add=seconds(lambda: a.add_(b, alpha=1e-3)),
            fill=seconds(lambda: gossip.fill_messages([a], None, 1.0, [(0.5, 1, c)])),
            merge=seconds(lambda: gossip.add_messages([a], None, 1.0, [(0.5, 1, c)], [b])),
            select=seconds(lambda: select(a, blocks)),
            scatter=64 * seconds(lambda: c.index_add_(0, some, a[: len(some)])),
            products=seconds(lambda: adasum.add_gram(rows, whole, products)) / 3,
            combine=seconds(lambda: adasum.combine_rows(rows, whole, weights, c)) / 2,
            narrow=seconds(lambda: narrow(a, message, "bf16")),
        )

    def faster(self, factor: float) -> "Speeds":
        """Return the speeds of a device with ``factor`` times the bandwidth."""
        return Speeds(**{name: value / factor for name, value in asdict(self).items()})


def _seconds(work: Callable[[], object], place: torch.device) -> float:
    """Return the median time of ``work`` on a device."""
    times = []
    for _ in range(TRIES + 1):
        wait_for_stream(place)  # work returns when its kernels are launched, not when they end
        start = time.perf_counter()
        work()
        wait_for_stream(place)
        times.append(time.perf_counter() - start)
    return median(times[1:])
