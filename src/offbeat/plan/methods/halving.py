"""The messages of Adasum's recursive halving, and when they arrive."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.comm.world import Axis
from offbeat.functional import Merge, cells_of, merges
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.methods.slot import Section


class Trade(NamedTuple):
    """Messages between participants at one time: whom each waits for, and the bytes it sends.

    ``near`` (n, most partners) are its partners, filled up with itself; ``out`` and ``into`` (n,).
    """

    near: NDArray[np.int64]
    out: Array
    into: Array

    def reversed(self) -> "Trade":
        """Return the same messages on their way back."""
        return Trade(self.near, self.into, self.out)

    def play(self, clocks: Clocks, axis: Axis) -> None:
        """Let every participant wait for its partners and for the messages."""
        fabric, size = clocks.fabric, len(self.near)
        local = fabric.ranks_per_node
        many, each = (local, 1) if axis == "node" else (1, local)
        clocks.count(axis, self.out.repeat(many).reshape(clocks.now.shape))
        home = np.arange(size) // each
        crosses = (home[self.near] != home[:, None]).any(axis=1)
        np.add.at(clocks.crossed, home, crosses * self.out * many)
        most = np.maximum(self.out, self.into)
        # All ranks of a node send at the same time, and share its link.
        between = 2 * fabric.latency + fabric.busy(1, 1) * local * most
        within = 2 * (fabric.inside(0) + (fabric.inside(1) - fabric.inside(0)) * most)
        now = clocks.now.reshape(size, many)
        ready = now[self.near].max(axis=1) + np.where(crosses, between, within)[:, None]
        moves = (self.near != np.arange(size)[:, None]).any(axis=1)
        clocks.wait(np.where(moves[:, None], ready, now).reshape(clocks.now.shape))


def swaps(size: int, body: Sequence[Section], level: int) -> Trade:
    """Return the trade of parts of the vectors in the merges of ``level``, 0 for adjacent ranks."""
    return _swaps(size, tuple(body), level)


@lru_cache(maxsize=64)
def _swaps(size: int, body: tuple[Section, ...], level: int) -> Trade:
    sent: dict[tuple[int, int], float] = {}
    for merge in _merges(size, level):
        for section in body:
            for start, middle, stop, left, right in cells_of(merge, section.numel):
                gives = ((left, right, stop - middle), (right, left, middle - start))
                for source, to, numel in gives:
                    sent[source, to] = sent.get((source, to), 0) + numel * section.itemsize
    return _trade(size, sent)


@lru_cache(maxsize=64)
def sums(size: int, nbytes: int, level: int) -> tuple[Trade, ...]:
    """Return the trades that add up the products of ``nbytes`` in the merges of ``level``."""
    rounds: list[dict[tuple[int, int], float]] = []
    for merge in _merges(size, level):
        count = merge.stop - merge.first
        paired = 1 << count.bit_length() - 1
        beyond = {(merge.first + r, merge.first + r - paired): nbytes for r in range(paired, count)}
        bits = [paired >> b for b in range(1, paired.bit_length())]
        found = [
            {(merge.first + r, merge.first + (r ^ bit)): nbytes for r in range(paired)}
            for bit in bits
        ]
        found = [beyond, *found, {(to, source): nbytes for source, to in beyond}]
        rounds += [{} for _ in range(len(found) - len(rounds))]
        for together, mine in zip(rounds, found, strict=False):
            together.update(mine)
    return tuple(_trade(size, sent) for sent in rounds if sent)


def _merges(size: int, level: int) -> set[Merge]:
    found = [merge for rank in range(size) for merge in merges(rank, size)]
    return {merge for merge in found if merge.middle - merge.first == 1 << level}


def _trade(size: int, sent: dict[tuple[int, int], float]) -> Trade:
    out, into = np.zeros(size), np.zeros(size)
    partners: list[set[int]] = [{rank} for rank in range(size)]
    for (source, to), nbytes in sent.items():
        out[source] += nbytes
        into[to] += nbytes
        partners[source].add(to)
        partners[to].add(source)
    most = max(map(len, partners))
    near = [[*sorted(p), *[rank] * (most - len(p))] for rank, p in enumerate(partners)]
    return Trade(np.array(near, np.int64), out, into)
