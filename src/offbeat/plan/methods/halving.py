"""The messages of Adasum's recursive halving, and when they arrive."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from offbeat.functional import Merge, cells_of, merges
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import Ranks, Section, partners
from offbeat.transport.world import Axis

Messages = tuple[Ranks, Ranks, Array]  # the sender, the receiver and the bytes of each


class Trade(NamedTuple):
    """Messages between participants at one time: whom each waits for, and the bytes it sends.

    ``near`` (most partners, n) are its partners, filled up with itself; ``out`` and ``into`` (n,).
    """

    near: Ranks
    out: Array
    into: Array


class Hop(NamedTuple):
    """A trade on one network: its ``seconds``, what ranks send and what leaves each node."""

    near: Ranks
    seconds: Array
    sent: Array
    crossed: Array

    def play(self, clocks: Clocks, axis: Axis) -> None:
        """Let every participant wait for its partners and for the messages."""
        clocks.count(axis, self.sent)
        clocks.crossed += self.crossed
        now = clocks.now.reshape(len(self.seconds), -1)
        ready = now
        for partner in self.near:
            ready = np.maximum(ready, now[partner])
        clocks.now = (ready + self.seconds).reshape(clocks.now.shape)


class LevelTimes(NamedTuple):
    """The merges of one level: parts are swapped, products added up, and results swapped back."""

    swap: Hop
    sums: tuple[Hop, ...]
    back: Hop


@lru_cache(maxsize=4)  # at 4,096 participants 10 MB; a prediction plays on three networks
def halving(
    size: int, body: tuple[Section, ...], nbytes: int, fabric: Fabric, axis: Axis
) -> tuple[LevelTimes, ...]:
    """Return the hops of all levels, from adjacent participants to the root.

    The vectors have the sections ``body``, and the products of a merge ``nbytes``.
    """
    return tuple(
        LevelTimes(
            _hop(swap, fabric, axis),
            tuple(_hop(trade, fabric, axis) for trade in sums),
            _hop(Trade(swap.near, swap.into, swap.out), fabric, axis),
        )
        for swap, sums in _trades(size, body, nbytes)
    )


def _hop(trade: Trade, fabric: Fabric, axis: Axis) -> Hop:
    size, local = len(trade.out), fabric.ranks_per_node
    many, each = (local, 1) if axis == "node" else (1, local)
    ranks = np.arange(size)
    crosses = (trade.near // each != ranks // each).any(axis=0)
    most = np.maximum(trade.out, trade.into)
    # All ranks of a node send at the same time, and share its link.
    latency, per_byte = np.full(size, fabric.latency), np.full(size, fabric.busy(1, 1) * local)
    if fabric.sites:
        rank, partner = np.broadcast_arrays(ranks, trade.near)
        far = rank // each != partner // each
        found = fabric.paths(rank[far] // each, partner[far] // each)
        for slowest, value in zip((latency, per_byte), (found[0], many * found[1]), strict=True):
            np.maximum.at(slowest, rank[far], value)
    between = 2 * latency + per_byte * most
    within = 2 * (fabric.inside(0) + (fabric.inside(1) - fabric.inside(0)) * most)
    moves = (trade.near != ranks).any(axis=0)
    return Hop(
        trade.near,
        (moves * np.where(crosses, between, within))[:, None],
        trade.out.repeat(many).reshape(fabric.nodes, local),
        _by_number(ranks // each, crosses * trade.out * many, fabric.nodes),
    )


@lru_cache(maxsize=8)  # at 4,096 participants a quarter of a second and 10 MB
def _trades(
    size: int, body: tuple[Section, ...], nbytes: int
) -> tuple[tuple[Trade, tuple[Trade, ...]], ...]:
    """Return the trade of parts of the vectors, and those of products, of every level."""
    levels = []
    for level in range((size - 1).bit_length()):
        found = [
            merge
            for first in range(0, size, 2 << level)
            for merge in merges(first, size)
            if merge.middle - merge.first == 1 << level
        ]
        swaps = [given for merge in found for section in body for given in _given(merge, section)]
        levels.append((_trade(size, swaps), _sums(size, found, nbytes)))
    return tuple(levels)


def _given(merge: Merge, section: Section) -> tuple[Messages, Messages]:
    """Return what the left block of a merge sends to the right one, and the right to the left."""
    count, middle = merge.stop - merge.first, merge.middle - merge.first
    start, kept, stop, left, right = _cells(Merge(0, middle, count), section.numel).T
    left, right = merge.first + left, merge.first + right
    return (
        (left, right, (stop - kept) * float(section.itemsize)),
        (right, left, (kept - start) * float(section.itemsize)),
    )


@lru_cache(maxsize=64)
def _cells(merge: Merge, numel: int) -> Ranks:
    """Return the cells (n, 5) of a merge, which are alike wherever its first rank is."""
    return np.array(cells_of(merge, numel), np.int64).reshape(-1, 5)


def _sums(size: int, found: list[Merge], nbytes: int) -> tuple[Trade, ...]:
    """Return the trades that add up the products in all merges of a level."""
    rounds: list[list[Messages]] = []
    for merge in found:
        count = merge.stop - merge.first
        paired = 1 << count.bit_length() - 1
        ranks, beyond = merge.first + np.arange(paired), merge.first + np.arange(paired, count)
        ours = [(beyond, beyond - paired)]
        for bit in range(paired.bit_length() - 2, -1, -1):
            ours.append((ranks, merge.first + (np.arange(paired) ^ (1 << bit))))
        ours.append((beyond - paired, beyond))
        rounds += [[] for _ in range(len(ours) - len(rounds))]
        for together, (source, to) in zip(rounds, ours, strict=False):
            together.append((source, to, np.full(len(source), float(nbytes))))
    trades = (_trade(size, messages) for messages in rounds)
    return tuple(trade for trade in trades if len(trade.near))


def _trade(size: int, messages: list[Messages]) -> Trade:
    source, to, nbytes = (np.concatenate(each) for each in zip(*messages, strict=True))
    sums = (_by_number(numbers, nbytes, size) for numbers in (source, to))
    return Trade(partners(source, to, size), *sums)


def _by_number(numbers: Ranks, nbytes: Array, count: int) -> Array:
    """Return the bytes that belong to each of the numbers below ``count``."""
    return np.asarray(np.bincount(numbers, nbytes, count), np.float64)
