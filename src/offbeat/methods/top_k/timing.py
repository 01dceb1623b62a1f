"""Durations of backward, selection and exchange, measured on the user's own run."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from offbeat.exchange.engine.bucket import BUCKET, capacity
from offbeat.functional import LinkCost, adaptive_ratio, exposed_seconds, max_speedup, speedup
from offbeat.functional.cost import INDEX
from offbeat.functional.messages.sixteen_bits import Sixteen
from offbeat.methods.top_k.payload import value_dtype
from offbeat.platform.device import wait_for_stream
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device
from offbeat.transport.small_gathers import gather_numbers

PROBES = (2**17, 2**19)  # bytes of the all-gathers that are timed: as large ones, around a ring
TRIES = 3


@dataclass(eq=False)
class LayerTimer:
    """Timer of a few backwards, layer by layer, in seconds; synchronizes an accelerator."""

    device: torch.device
    # The time of backward itself until a layer's gradient was ready, that to add it, with a share
    # by size of the launch of its message, and that outside.
    compute: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    select: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    forward: list[float] = field(default_factory=list)
    ended: float | None = None  # when the last backward was over
    left: float | None = None  # when backward last resumed after the exchange's own work
    entered: float = 0.0  # when the last gradient was ready

    def enter(self, name: str) -> None:
        """Note that the gradient of ``name`` is ready."""
        self.entered = self._now()
        if self.left is not None:
            self.compute[name].append(self.entered - self.left)
        elif self.ended is not None:
            self.forward.append(self.entered - self.ended)

    def added(self, name: str) -> None:
        """Note that the gradient of ``name`` was added to its message."""
        self.left = self._now()
        self.select[name].append(self.left - self.entered)

    def launched(self, sizes: Mapping[str, int]) -> None:
        """Note that a message of layers of these ``sizes`` was filled and launched."""
        before, self.left = self.left, self._now()
        assert before is not None, "what is launched was added"
        share = (self.left - before) / max(1, sum(sizes.values()))
        for name, size in sizes.items():
            self.select[name][-1] += share * size

    def finish(self) -> None:
        """Note that backward is over."""
        self.ended, self.left = self._now(), None

    def _now(self) -> float:
        wait_for_stream(self.device)
        return time.perf_counter()


@dataclass(frozen=True)
class LayerTimes:
    """Means over ranks of each rank's medians, in seconds; equal on all ranks."""

    compute: Mapping[str, float]
    select: Mapping[str, float]
    forward: float
    link: LinkCost

    @property
    def backward(self) -> float:
        """The duration of a backward: the sum over layers."""
        return sum(self.compute.values())

    def ratios(
        self,
        parameters: Mapping[str, Tensor],
        limit: float,
        message: float,
        wire: Sixteen | None = None,
    ) -> dict[str, float]:
        """Return the compression ratio of every layer: eq. 18, unless all dense ends no later.

        That equation lets an exchange overlap with the next layer's backward alone, even if that
        layer is a bias; an exchange that ends later may still overlap with further layers.
        ``limit`` is the largest ratio, ``message`` the bytes of a sparse message.
        """
        bucket = capacity(sum(parameters[name].nbytes for name in self.compute), BUCKET)
        after = [*list(self.compute.values())[1:], 0.0]
        ratios: dict[str, float] = {}
        dense, mixed = [], []
        for (name, compute), budget in zip(self.compute.items(), after, strict=True):
            parameter, select = parameters[name], self.select[name]
            # Layers of one message share its latency, according to how full of one it is at most.
            link = self._link(parameter.nbytes / limit / message)
            value = value_dtype(parameter.dtype, wire).itemsize
            ratio = ratios[name] = adaptive_ratio(
                parameter.numel(),
                link,
                compute=budget,
                select=select,
                limit=limit,
                itemsize=value,
                dense_itemsize=parameter.dtype.itemsize,
            )
            whole = self._link(parameter.nbytes / bucket).all_reduce(parameter.nbytes)
            dense.append((compute, whole))
            part = link.all_gather(parameter.numel() * (value + INDEX) / ratio)
            mixed.append((compute + select, part) if ratio > 1 else (compute, whole))
        selecting = sum(self.select[name] for name, ratio in ratios.items() if ratio > 1)
        quicker = exposed_seconds(dense) <= exposed_seconds(mixed) + selecting
        return dict.fromkeys(ratios, 1.0) if quicker else ratios

    def summary(self, exchange: float, waited: float) -> dict[str, Any]:
        """Return these times for ``replica.stats()``, and what they allow.

        ``S_max`` is the bound of eq. 19 and ``share`` the share of its gain that is reached: the
        exchange takes t_c in all, of which the last step ``waited``.
        """
        hidden = min(max(0.0, exchange - waited), self.backward)
        bound = max_speedup(self.forward, self.backward, exchange) if exchange > 0 else 1.0
        reached = speedup(self.forward, self.backward, exchange, hidden)
        return {
            "t_comp": dict(self.compute),
            "t_spar": dict(self.select),
            "t_forward": self.forward,
            "t_comm": exchange,
            "latency": self.link.latency,
            "seconds_per_byte": self.link.per_byte,
            "S_max": bound,
            "share": (reached - 1) / (bound - 1) if bound > 1 else 1.0,
        }

    def _link(self, share: float) -> LinkCost:
        return replace(self.link, latency=self.link.latency * min(1.0, share))


def average_times(timer: LayerTimer, order: Sequence[str], group: Group) -> LayerTimes:
    """Measure two all-gathers and return the means of all ranks' times; all ranks call."""
    mine = [median(timer.compute[name] or [0.0]) for name in order]
    mine += [median(timer.select[name] or [0.0]) for name in order]
    mine += [median(timer.forward or [0.0]), *(_timed(n, timer.device, group) for n in PROBES)]
    means = [fmean(column) for column in zip(*gather_numbers(mine, group), strict=True)]
    *layers, forward, small, large = means
    link = LinkCost.fit(group.size, list(zip(PROBES, (small, large), strict=True)))
    halves = layers[: len(order)], layers[len(order) :]
    compute, select = (dict(zip(order, half, strict=True)) for half in halves)
    return LayerTimes(compute, select, forward, link)


def _timed(nbytes: int, device: torch.device, group: Group) -> float:
    """Return the seconds of an all-gather, the best of a few: other load only adds to it."""
    mine = torch.zeros(nbytes, dtype=torch.uint8, device=message_device(group, device))
    everyone = torch.zeros(group.size * nbytes, dtype=torch.uint8, device=mine.device)
    best = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        all_gather(everyone, mine, group).wait()
        wait_for_stream(mine.device)
        best = min(best, time.perf_counter() - start)
    return best
