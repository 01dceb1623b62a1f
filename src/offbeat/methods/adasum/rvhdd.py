"""Adasum by recursive vector halving and distance doubling, the paper's Algorithm 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from offbeat.functional import Merge, Segments, cells_of, merges
from offbeat.functional.adasum import factor
from offbeat.kernels.dispatch import adasum_passes, machine_code
from offbeat.methods.adasum.reduction import Reduction, Statistics
from offbeat.methods.adasum.slice_layout import Piece, SliceLayout
from offbeat.platform.device import host_array
from offbeat.transport.collectives import all_reduce, broadcast
from offbeat.transport.messages import MessageRounds, Round, Transfer

# Bytes of a slice, at most, whose messages may arrive before this rank waits for them: every level
# then needs room of its own. A rank has one partner at a time, so that no two senders share the
# link of a receiver for long.
EARLY = 2**21


@dataclass(frozen=True)
class Half:
    """A part of the slice that this rank and ``partner`` hold of two vectors that merge."""

    partner: int
    keep: Piece
    give: Piece
    place: slice  # of both vectors of what it keeps, in the room of the level


@dataclass(frozen=True, eq=False)
class Level:
    """A merge of two vectors a and b, and what this rank knows of them."""

    merge: Merge
    kept: list[Tensor]  # of every half: its part of its own vector
    segments: list[Segments]  # the layers
    rows: list[Tensor]  # (2, elements): both vectors
    products: Tensor  # (layers, 4): a . a, a . b, the energy and b . b
    terms: list[Tensor | None]  # what is added to these after each message, if anything is
    weights: Tensor  # (layers, 2): the coefficients of a and b


@final
class Rvhdd(Reduction):
    r"""Ranks at distance 1, 2, 4, ... exchange halves of their vectors and combine them.

    For any number of ranks, see :mod:`offbeat.functional.halving`. Sends 2 (P-1)/P of the slice's
    bytes (the mean of all ranks; for P that is no power of two some send up to 4 % more) in
    2 log2 P rounds, and in each of the first half also the products of all layers, log2 P times at
    most. Extra memory: one slice, two if it has at most 2 MiB. Passes over memory: two, of P-1/P
    slices. Every level rounds to the dtype of the vectors.

    All three products of a pair are summed at every level, although |AS(a, b)|^2 follows from
    those of the level before: both vectors are in the cache for a . b anyway, and no digits are
    lost where nearly opposite vectors cancel.

    Source: Maleki et al. 2021, Algorithm 1, for powers of two; others as in
    :func:`offbeat.functional.tree`.
    """

    def __init__(self, layout: SliceLayout, slices: Sequence[Tensor]) -> None:
        """Allocate room for the two halves of a pair, and prepare the messages."""
        self._layout, self._slices = layout, slices
        peers = layout.participants
        # Otherwise the next level's halves would overwrite those of this one.
        self._early = EARLY if sum(part.nbytes for part in slices) <= EARLY else 0
        self._there = self._back = None
        self._levels: list[Level] = []
        there, back, room = list[Round](), list[Round](), list[Tensor]()
        for merge in merges(peers.rank, peers.size):
            halves = self._halves_of(merge) if peers.group is not None else []
            room = self._room(halves, room)
            level, rounds, last = self._level(merge, halves, room)
            self._levels.append(level)
            there += rounds
            back.insert(0, last)
        if peers.group is not None:
            self._there = MessageRounds(there, peers.group, self._early)
            self._back = MessageRounds(back, peers.group, self._early)
        # Ranks may use different ones: each element is combined on one rank, from weights that are
        # equal on all.
        device = slices[0].device
        self._passes = adasum_passes(device, machine_code(device) != "")

    @property
    def memory(self) -> list[Tensor]:
        """The buffers of messages and of other participants' vectors."""
        return [part for level in self._levels for part in level.rows]

    @np.errstate(all="ignore")  # the caller looks for NaNs in the statistics
    def compare(self) -> Statistics:
        """Reduce by halves: at the end this rank holds its share of the combination."""
        peers, before, size = self._layout.participants, None, 1
        if self._there is not None:
            self._there.expect()
        for level in self._levels:
            self._swap(level)
            products = level.products.zero_()
            for rows, within in zip(level.rows, level.segments, strict=True):
                self._passes.add_gram(rows, within, products.view(-1, 2, 2))
            if peers.inside is not None:
                peers.wait(all_reduce(products, peers.inside))
            _note_energy(level, before, size)
            self._complete(level)
            _weigh(level)
            before, size = level, level.merge.stop - level.merge.first
            for rows, within, kept in zip(level.rows, level.segments, level.kept, strict=True):
                self._passes.combine_rows(rows, within, level.weights, kept)
        if peers.inside is not None and peers.inside.size > peers.slices:
            peers.wait(broadcast(products, 0, peers.inside))
            _weigh(level)
        aa, ab, energy, bb = products.clone().unbind(1)
        ca, cb = level.weights.unbind(1)
        return Statistics(energy, (ca * (ca * aa) + 2 * ca * cb * ab + cb * (cb * bb)) / energy)

    def combine(self) -> None:
        """Gather the halves in reverse order."""
        if self._back is not None:
            self._back.expect()
            for _ in self._levels:
                self._layout.participants.wait(self._back.start())

    def _room(self, halves: Sequence[Half], last: list[Tensor]) -> list[Tensor]:
        """Return where both vectors lie in what this rank keeps; in ``last`` if those may go."""
        widths = [
            max((half.place.stop for half in halves if half.keep.section == section), default=0)
            for section in range(len(self._slices))
        ]
        fits = [part.numel() >= width for part, width in zip(last, widths, strict=False)]
        if not self._early and fits and all(fits):
            return last
        return [part.new_empty(width) for part, width in zip(self._slices, widths, strict=True)]

    def _level(
        self, merge: Merge, halves: list[Half], room: Sequence[Tensor]
    ) -> tuple[Level, list[Round], Round]:
        """Return a level and its messages: the halves, then the products, and the way back."""
        rows = [room[half.keep.section][half.place].view(2, -1) for half in halves]
        kept = [half.keep.of(self._slices) for half in halves]
        within = [self._layout.segments(half.keep) for half in halves]
        layers, device = self._layout.layers, self._slices[0].device
        products = torch.zeros(layers, 4, dtype=torch.float64, device=device)
        weights = torch.zeros(layers, 2, dtype=torch.float64, device=device)
        sums = self._sums(merge, products)
        level = Level(merge, kept, within, rows, products, [term for _, term in sums], weights)
        theirs, partners = self._theirs(merge), [half.partner for half in halves]
        given = _filled(partners, [half.give.of(self._slices) for half in halves])
        taken = _filled(partners, [both[theirs] for both in rows])
        return (
            level,
            [(given, taken), *(each for each, _ in sums)],
            (_filled(partners, kept), given),
        )

    def _theirs(self, merge: Merge) -> int:
        """Return the row of the vector that this rank had no part of."""
        return 1 if self._layout.participants.rank < merge.middle else 0

    def _sums(self, merge: Merge, products: Tensor) -> list[tuple[Round, Tensor | None]]:
        """Return the messages that sum products, and with each what is added after it."""
        rank, size = self._layout.participants.rank, merge.stop - merge.first
        place, mine = rank - merge.first, products.view(-1)
        paired = 1 << size.bit_length() - 1  # ranks beyond a power of two add theirs to another's
        found: list[tuple[Round, Tensor | None]] = []
        if place + paired < size:
            term = torch.empty_like(products)
            found.append((([], [(rank + paired, term.view(-1))]), term))
        elif place >= paired:
            found.append((([(rank - paired, mine)], []), None))
        bit = paired // 2 if place < paired else 0
        while bit:
            term, partner = torch.empty_like(products), merge.first + (place ^ bit)
            # The same two numbers on both sides.
            found.append((([(partner, mine)], [(partner, term.view(-1))]), term))
            bit //= 2
        if place + paired < size:
            found.append((([(rank + paired, mine)], []), None))
        elif place >= paired:
            found.append((([], [(rank - paired, mine)]), None))
        return found

    def _halves_of(self, merge: Merge) -> list[Half]:
        rank, found = self._layout.participants.rank, []
        for section, length in enumerate(self._layout.lengths):
            start = 0
            for cell in cells_of(merge, length):
                if rank in (cell.left, cell.right):
                    first = Piece(section, cell.start, cell.middle)
                    last = Piece(section, cell.middle, cell.stop)
                    is_left = rank == cell.left
                    keep, give = (first, last) if is_left else (last, first)
                    stop = start + 2 * (keep.stop - keep.start)
                    partner = cell.right if is_left else cell.left
                    found.append(Half(partner, keep, give, slice(start, stop)))
                    start = stop
        return found

    def _swap(self, level: Level) -> None:
        """Give the partners their parts of this rank's vector, for the same parts of theirs."""
        if self._there is None:
            return
        swapped = self._there.start()
        mine = 1 - self._theirs(level.merge)
        for kept, rows in zip(level.kept, level.rows, strict=True):
            rows[mine].copy_(kept)
        self._layout.participants.wait(swapped)

    def _complete(self, level: Level) -> None:
        """Sum the products over the ranks that hold parts of these two vectors."""
        if self._there is None:
            return
        for term in level.terms:
            self._layout.participants.wait(self._there.start())
            if term is not None:
                host_array(level.products)[...] += host_array(term)


def _note_energy(level: Level, before: Level | None, size: int) -> None:
    """Note this rank's part of the squared norms of all combined vectors, in place of b . a."""
    # Its own block of ``size`` ranks, all of which know their sum, has merged ``before``. Of a
    # block of one rank it is the squared norm, to whose parts the products of the merge add up.
    products, merge = host_array(level.products), level.merge
    left, right = merge.middle - merge.first, merge.stop - merge.middle
    products[:, 2] = products[:, 0] * (left == 1) + products[:, 3] * (right == 1)
    if before is not None:
        products[:, 2] += host_array(before.products)[:, 2] / size


def _weigh(level: Level) -> None:
    """Compute the coefficients of both vectors from their products."""
    products, weights = host_array(level.products), host_array(level.weights)
    share = level.merge.share
    weights[:, 0] = factor(share, products[:, 1], products[:, 0])
    weights[:, 1] = factor(1 - share, products[:, 1], products[:, 3])


def _filled(partners: Sequence[int], parts: Sequence[Tensor]) -> list[Transfer]:
    """Return the messages that are not empty; both sides leave out the same."""
    return [(to, part) for to, part in zip(partners, parts, strict=True) if part.numel() > 0]
