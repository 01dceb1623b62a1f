"""Rings, trees and direct exchanges over far links: what a sum costs in round trips."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bench.harness import GOAL, Bench, Result, at_least, command
from bench.harness.ranks import on_nodes, seconds_together

NODES, NUMELS = (4, 8), (2**10, 2**18, 2**21)  # 4 KiB, 1 and 8 MiB
RATE, LATENCY, LEAD, TURNS = "100mbit", "50ms", 2, 3
HEADINGS = ("nodes", "bytes", "ring", "tree", "direct", "ring over the fastest")
BENCH = Bench(name="internet/shapes", minutes=6)


def ring(tensor: Tensor) -> None:
    """2 (n-1) hops of 1/n, as Gloo does it."""
    dist.all_reduce(tensor)


def tree(tensor: Tensor) -> None:
    """2 log2(n) hops of all values, to the first rank and back."""
    rank, size, other = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    levels = [2**level for level in range((size - 1).bit_length())]
    for step in levels:
        if rank % (2 * step) == step:
            dist.send(tensor, rank - step)
        elif rank % (2 * step) == 0 and rank + step < size:
            dist.recv(other, rank + step)
            tensor += other
    for step in reversed(levels):
        if rank % (2 * step) == step:
            dist.recv(tensor, rank - step)
        elif rank % (2 * step) == 0 and rank + step < size:
            dist.send(tensor, rank + step)


def direct(tensor: Tensor) -> None:
    """Two hops: each rank sums a slice that all send it at once, and sends the sum to all."""
    rank, slices = dist.get_rank(), tensor.chunk(dist.get_world_size())
    parts = [torch.empty_like(slices[rank]) for _ in slices]
    _with_all(lambda other: slices[other], lambda other: parts[other])
    for other, part in enumerate(parts):
        if other != rank:
            slices[rank].add_(part)
    _with_all(lambda other: slices[rank], lambda other: slices[other])


def _with_all(sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> None:
    others = [other for other in range(dist.get_world_size()) if other != dist.get_rank()]
    works = [dist.irecv(received(other), other) for other in others]
    works += [dist.isend(sent(other), other) for other in others]
    for work in works:
        if work is not None:
            work.wait()


SHAPES = ring, tree, direct


def timed(numels: tuple[int, ...]) -> list[list[float]]:
    """Seconds of one sum, by size and shape, once windows of TCP have grown."""
    return [[_seconds(shape, torch.zeros(numel)) for shape in SHAPES] for numel in numels]


def _seconds(shape: Callable[[Tensor], None], tensor: Tensor) -> float:
    def some(turns: int) -> None:
        for _ in range(turns):
            shape(tensor)

    some(LEAD)
    return seconds_together(partial(some, TURNS)) / TURNS


@command(BENCH)
def app() -> Result:
    """Time sums of three sizes over four and eight nodes."""
    rows, gains = [], {}
    for nodes in NODES:
        for numel, each in zip(NUMELS, on_nodes(timed, NUMELS, nodes, 1, RATE, latency=LATENCY),
                               strict=True):  # fmt: skip
            gains[nodes, numel] = each[0] / min(each)
            shown = [f"{1e3 * seconds:.0f} ms" for seconds in each]
            rows.append((f"{nodes}", f"{4 * numel:,}", *shown, f"{gains[nodes, numel]:.2f}"))
    few = min(gains[nodes, NUMELS[0]] for nodes in NODES)
    text = f"a ring over the fastest, of {4 * NUMELS[0]:,} bytes"
    claims = [at_least(text, few, 1.5, "{:.2f}", "(the least)", GOAL)]
    title = f"Seconds of an all-reduce at {RATE}, {2 * int(LATENCY[:-2])} ms there and back"
    return Result(title, HEADINGS, rows, claims)
