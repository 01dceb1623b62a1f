"""Adasum by recursive vector halving and distance doubling, the paper's Algorithm 1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce, broadcast
from offbeat.comm.messages import Transfer, exchange
from offbeat.functional import Merge, cells_of, merges, pair_coefficients
from offbeat.kernels.dispatch import adasum_passes, machine_code
from offbeat.parameters.adasum.reduction import Reduction, Statistics
from offbeat.parameters.adasum.rounding import Rounding
from offbeat.parameters.adasum.slice_layout import Piece, SliceLayout


@dataclass(frozen=True)
class Half:
    """A part of the slice that this rank and ``partner`` hold of two vectors that merge.

    This rank keeps the one piece and gives the other. ``room`` is where both vectors of what it
    keeps lie, one after the other.
    """

    partner: int
    keep: Piece
    give: Piece
    room: slice


@final
class Rvhdd(Reduction):
    r"""Ranks at distance 1, 2, 4, ... exchange halves of their vectors and combine them.

    For any number of ranks, see :mod:`offbeat.functional.halving`. Sends 2 (P-1)/P of the slice's
    bytes (the mean of all ranks; for P that is no power of two some send up to 4 % more) in
    2 log2 P rounds, and in each of the first half also the products of all layers, log2 P times at
    most. Extra memory: one slice. Passes over memory: two, of P-1/P slices. Every level rounds to
    the dtype of the vectors.

    All three products of a pair are summed at every level, although |AS(a, b)|^2 follows from
    those of the level before: both vectors are in the cache for a . b anyway, and no digits are
    lost where nearly opposite vectors cancel.

    Source: Maleki et al. 2021, Algorithm 1, for powers of two; others as in
    :func:`offbeat.functional.tree`.
    """

    def __init__(self, layout: SliceLayout, slices: Sequence[Tensor]) -> None:
        """Allocate room for the two halves of a pair."""
        self._layout, self._slices = layout, slices
        peers = layout.participants
        self._merges = list(merges(peers.rank, peers.size))
        has_group = peers.group is not None
        self._halves = [self._halves_of(merge) if has_group else [] for merge in self._merges]
        widths = [[_width(halves, i) for i in range(len(slices))] for halves in self._halves]
        self._room = [part.new_empty(max(w)) for part, *w in zip(slices, *widths, strict=True)]
        # Ranks may use different ones: each element is combined on one rank, from weights that are
        # equal on all.
        device = slices[0].device
        self._passes = adasum_passes(device, machine_code(device) != "")

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """None: messages have full precision."""
        return []

    def compare(self) -> Statistics:
        """Reduce by halves: at the end this rank holds its share of the combination."""
        peers, shape = self._layout.participants, (self._layout.layers, 4)
        products = torch.zeros(shape, dtype=torch.float64, device=self._slices[0].device)
        share, size = 0.5, 1
        for merge, halves in zip(self._merges, self._halves, strict=True):
            energy = products[:, 3].clone()
            self._swap(merge, halves)
            products = self._products(halves)
            if peers.inside is not None:
                peers.wait(all_reduce(products, peers.inside))
            _note_energy(products, energy, merge, size)
            self._complete(products, merge)
            share, size = merge.share, merge.stop - merge.first
            weights = torch.stack(pair_coefficients(products[:, :3], share), -1)
            for half in halves:
                segments, out = self._layout.segments(half.keep), half.keep.of(self._slices)
                self._passes.combine_rows(self._rows(half), segments, weights, out)
        if peers.inside is not None and peers.inside.size > peers.slices:
            peers.wait(broadcast(products, 0, peers.inside))
        aa, ab, bb, energy = products.unbind(1)
        ca, cb = pair_coefficients(products[:, :3], share)
        return Statistics(energy, (ca * (ca * aa) + 2 * ca * cb * ab + cb * (cb * bb)) / energy)

    def combine(self) -> None:
        """Gather the halves in reverse order."""
        peers = self._layout.participants
        for halves in reversed(self._halves):
            if peers.group is not None:
                sends = [(half.partner, half.keep.of(self._slices)) for half in halves]
                receives = [(half.partner, half.give.of(self._slices)) for half in halves]
                peers.wait(exchange(_filled(sends), _filled(receives), peers.group))

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

    def _swap(self, merge: Merge, halves: Sequence[Half]) -> None:
        """Give the partners their parts of this rank's vector, for the same parts of theirs."""
        peers = self._layout.participants
        if peers.group is None:
            return
        mine, theirs = (0, 1) if peers.rank < merge.middle else (1, 0)
        sends, receives = [], []
        for half in halves:
            rows = self._rows(half)
            sends.append((half.partner, half.give.of(self._slices)))
            receives.append((half.partner, rows[theirs]))
            rows[mine].copy_(half.keep.of(self._slices))
        peers.wait(exchange(_filled(sends), _filled(receives), peers.group))

    def _rows(self, half: Half) -> Tensor:
        room: Tensor = self._room[half.keep.section][half.room]
        return room.view(2, -1)

    def _products(self, halves: Sequence[Half]) -> Tensor:
        """Return this rank's part of a . a, a . b and b . b, and a column of zeros; (layers, 4)."""
        products = torch.zeros(
            self._layout.layers, 2, 2, dtype=torch.float64, device=self._slices[0].device
        )
        for half in halves:
            self._passes.add_gram(self._rows(half), self._layout.segments(half.keep), products)
        return products.view(-1, 4)[:, [0, 1, 3, 2]].contiguous()

    def _complete(self, products: Tensor, merge: Merge) -> None:
        """Sum over the ranks that hold parts of these two vectors; equal on all bit for bit."""
        peers = self._layout.participants
        if peers.group is None:
            return
        size, place = merge.stop - merge.first, peers.rank - merge.first
        paired = 1 << size.bit_length() - 1  # ranks beyond a power of two add theirs to another's
        theirs = torch.empty_like(products)
        if place + paired < size:
            self._trade(merge.first + place + paired, receive=theirs)
            products.add_(theirs)
        elif place >= paired:
            self._trade(peers.rank - paired, send=products)
        bit = paired // 2 if place < paired else 0
        while bit:
            self._trade(merge.first + (place ^ bit), send=products, receive=theirs)
            products.add_(theirs)  # the same two numbers on both sides
            bit //= 2
        if place + paired < size:
            self._trade(merge.first + place + paired, send=products)
        elif place >= paired:
            self._trade(peers.rank - paired, receive=products)

    def _trade(
        self, partner: int, send: Tensor | None = None, receive: Tensor | None = None
    ) -> None:
        peers = self._layout.participants
        assert peers.group is not None, "only ranks with counterparts have products"
        sends = [(partner, send.view(-1))] if send is not None else []
        receives = [(partner, receive.view(-1))] if receive is not None else []
        peers.wait(exchange(sends, receives, peers.group))


def _note_energy(products: Tensor, energy: Tensor, merge: Merge, size: int) -> None:
    """Set the last column to this rank's part of the squared norms of all combined vectors.

    ``energy`` is their sum in its own block of ``size`` ranks, all of which know it. Of a block of
    one rank it is the squared norm, to whose parts the products of the merge add up.
    """
    left, right = merge.middle - merge.first, merge.stop - merge.middle
    products[:, 3] = products[:, 0] * (left == 1) + products[:, 2] * (right == 1)
    if size > 1:
        products[:, 3] += energy / size


def _width(halves: Sequence[Half], section: int) -> int:
    return max((half.room.stop for half in halves if half.keep.section == section), default=0)


def _filled(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Return the messages that are not empty; both sides leave out the same."""
    return [(rank, part) for rank, part in transfers if part.numel() > 0]
