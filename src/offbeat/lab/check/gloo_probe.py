"""The script that every rank of ``offbeat lab --check`` runs; it uses Gloo but not offbeat.

The first rank of each node takes part, since the links of nodes are measured. Ranks 0 and 1
measure once more if they share a node. Rank 0 prints the times in seconds as one line of JSON.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Gloo transfers larger messages in one direction at a time, although links are full duplex.
PIECE = 2**20


def time_patterns(
    size: int, repeats: int, round_trips: int, leaders: list[int]
) -> dict[str, float]:
    """Measure the seconds for ``size`` bytes in each pattern, and for a round trip of one byte.

    ``leaders`` are the ranks that take part, at least two; the other ranks wait.
    """
    links = dist.new_group(leaders)
    numbers = torch.zeros(size // 4)
    first, second = leaders[:2]
    there, back = (first, second), (second, first)
    patterns: dict[str, tuple[Sequence[int], Callable[[], object]]] = {
        "round_trip": (there, lambda: _round_trips(first, second, round_trips)),
        "one_way": (there, lambda: _transfer(size, [there])),
        "both_ways": (there, lambda: _transfer(size, [there, back])),
        "all_reduce": (leaders, lambda: dist.all_reduce(numbers, group=links)),
    }
    if 1 not in leaders:
        patterns["inside_node"] = ((0, 1), lambda: _transfer(size, [(0, 1)]))
    result = {name: _seconds(*pattern, repeats) for name, pattern in patterns.items()}
    return result | {"round_trip": result["round_trip"] / round_trips}


def _seconds(ranks: Sequence[int], work: Callable[[], object], repeats: int) -> float:
    """Return the median time of ``work`` on this rank."""
    times = []
    for _ in range(repeats + 1):
        dist.barrier()  # no other message is in flight
        start = time.perf_counter()
        if dist.get_rank() in ranks:
            work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first is a warm-up


def _transfer(size: int, pairs: Sequence[tuple[int, int]]) -> None:
    """Send ``size`` bytes along each (sender, receiver), and wait until all have arrived."""
    me = dist.get_rank()
    works: list[dist.Work | None] = []
    # Receives first: the notification that one is posted would queue behind our own messages.
    for sender, receiver in pairs:
        if me == receiver:
            works += [dist.irecv(piece, sender, tag=tag) for tag, piece in _pieces(size)]
    for sender, receiver in pairs:
        if me == sender:
            works += [dist.isend(piece, receiver, tag=tag) for tag, piece in _pieces(size)]
    for work in works:
        assert work is not None, "None only for ranks outside the group"
        work.wait()
    # A send completes when the kernel has the message: the receiver confirms its arrival.
    _round_trips(pairs[0][1], pairs[0][0], 1)


def _pieces(size: int) -> Iterable[tuple[int, Tensor]]:
    return enumerate(torch.zeros(size, dtype=torch.uint8).split(PIECE))


def _round_trips(first: int, second: int, times: int) -> None:
    byte = torch.zeros(1, dtype=torch.uint8)
    for _ in range(times):
        for sender, receiver in ((first, second), (second, first)):
            if dist.get_rank() == sender:
                dist.send(byte, receiver, tag=PIECE)
            elif dist.get_rank() == receiver:
                dist.recv(byte, sender, tag=PIECE)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    figures = time_patterns(*map(json.loads, sys.argv[1:]))
    if os.environ["RANK"] == "0":
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()
