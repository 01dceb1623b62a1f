"""Adasum by recursive vector halving and distance doubling, the paper's Algorithm 1."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce, broadcast
from offbeat.comm.messages import exchange
from offbeat.functional import add_gram, combine_rows, pair_coefficients
from offbeat.parameters.adasum.reduction import Reduction, Statistics
from offbeat.parameters.adasum.rounding import Rounding
from offbeat.parameters.adasum.slice_layout import Piece, SliceLayout


@final
class Rvhdd(Reduction):
    r"""Ranks at distance 1, 2, 4, ... exchange halves of their vectors and combine them.

    For powers of two. Sends 2 (P-1)/P of the slice's bytes in 2 log2 P rounds, and in each of
    the first half also the products of all layers, log2 P times at most. Extra memory: one slice.
    Passes over memory: two, of P-1/P slices. Every level rounds to the dtype of the vectors.

    All three products of a pair are summed at every level, although |AS(a, b)|^2 follows from
    those of the level before: both vectors are in the cache for a . b anyway, and no digits are
    lost where nearly opposite vectors cancel.

    Source: Maleki et al. 2021, Algorithm 1.
    """

    def __init__(self, layout: SliceLayout, slices: Sequence[Tensor]) -> None:
        """Allocate room for the two halves of a pair."""
        self._layout, self._slices = layout, slices
        self._pairs = [
            part.new_empty(2, part.numel() // 2 if layout.participants.group is not None else 0)
            for part in slices
        ]

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """None: messages have full precision."""
        return []

    def compare(self) -> Statistics:
        """Reduce by halves: at the end this rank holds its share of the combination."""
        peers, slices = self._layout.participants, self._slices
        held, distance = self._layout.whole(), 1
        products = torch.zeros(self._layout.layers, 4, dtype=torch.float64, device=slices[0].device)
        while distance < peers.size:
            energy = products[:, 3].clone()
            products.zero_()
            if peers.group is not None:
                held = self._swap_halves(held, distance)
                products = self._products(held)
            self._complete(products, energy, distance)
            weights = torch.stack(pair_coefficients(products[:, :3]), -1)
            if peers.group is not None:
                for pair, half in zip(self._pairs, held, strict=True):
                    width = half.stop - half.start
                    combine_rows(
                        pair[:, :width], self._layout.segments(half), weights, half.of(slices)
                    )
            distance *= 2
        if peers.inside is not None and peers.inside.size > peers.slices:
            peers.wait(broadcast(products, 0, peers.inside))
        aa, ab, bb, energy = products.unbind(1)
        ca, cb = pair_coefficients(products[:, :3])
        return Statistics(energy, (ca * (ca * aa) + 2 * ca * cb * ab + cb * (cb * bb)) / energy)

    def combine(self) -> None:
        """Gather the halves in reverse order."""
        group = self._layout.participants.group
        distance = self._layout.participants.size // 2
        while group is not None and distance:
            partner = group.rank ^ distance
            held, other = self._held(group.rank, distance), self._held(partner, distance)
            sends = [(partner, half.of(self._slices)) for half in held]
            receives = [(partner, half.of(self._slices)) for half in other]
            self._layout.participants.wait(exchange(sends, receives, group))
            distance //= 2

    def _held(self, rank: int, distance: int) -> list[Piece]:
        """Return what a rank holds after the exchange at ``distance``."""
        held, bit = self._layout.whole(), 1
        while bit <= distance:
            held = [_half(piece, first=not rank & bit) for piece in held]
            bit *= 2
        return held

    def _swap_halves(self, held: Sequence[Piece], distance: int) -> list[Piece]:
        group = self._layout.participants.group
        assert group is not None, "only ranks with counterparts hold halves"
        partner, is_left = group.rank ^ distance, not group.rank & distance
        keep = [_half(piece, first=is_left) for piece in held]
        give = [_half(piece, first=not is_left) for piece in held]
        sends, receives = [], []
        for pair, mine, theirs in zip(self._pairs, keep, give, strict=True):
            width = mine.stop - mine.start
            sends.append((partner, theirs.of(self._slices)))
            receives.append((partner, pair[1 if is_left else 0, :width]))
            pair[0 if is_left else 1, :width].copy_(mine.of(self._slices))
        self._layout.participants.wait(exchange(sends, receives, group))
        return keep

    def _products(self, held: Sequence[Piece]) -> Tensor:
        """Return this rank's part of a . a, a . b and b . b, and a column of zeros; (layers, 4)."""
        products = torch.zeros(
            self._layout.layers, 2, 2, dtype=torch.float64, device=self._pairs[0].device
        )
        for pair, half in zip(self._pairs, held, strict=True):
            add_gram(pair[:, : half.stop - half.start], self._layout.segments(half), products)
        return products.view(-1, 4)[:, [0, 1, 3, 2]].contiguous()

    def _complete(self, products: Tensor, energy: Tensor, distance: int) -> None:
        """Sum over the ranks that hold parts of these two vectors."""
        peers = self._layout.participants
        if peers.inside is not None:
            peers.wait(all_reduce(products, peers.inside))
        # The squared norms of all vectors combined in a and b: each is known to half of the ranks.
        first = products[:, 0] + products[:, 2]
        products[:, 3] = first if distance == 1 else energy / distance
        theirs = torch.empty_like(products)
        bit = distance
        while peers.group is not None and bit:
            partner = peers.group.rank ^ bit
            sends, receives = [(partner, products.view(-1))], [(partner, theirs.view(-1))]
            peers.wait(exchange(sends, receives, peers.group))
            products.add_(theirs)  # the same two numbers on both sides: equal bit for bit
            bit //= 2


def _half(piece: Piece, first: bool) -> Piece:
    middle = (piece.start + piece.stop) // 2
    if first:
        return Piece(piece.section, piece.start, middle)
    return Piece(piece.section, middle, piece.stop)
