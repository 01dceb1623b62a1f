"""All peers' vectors of some pieces of a slice, compared and combined."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.adasum_wire.cut import Cut, Piece
from offbeat.adasum_wire.wire import Verdict
from offbeat.collectives import all_gather
from offbeat.functional import (
    RowPasses,
    clip,
    coefficients,
    combine,
    gram,
    orthogonality,
    row_passes,
    tree,
)


class Rows:
    """One row for each peer, piece by piece, and what is known of all layers.

    ``split``: whether peers hold different pieces, or all the same. Dot products are float64 sums
    of what was sent.
    """

    def __init__(
        self,
        cut: Cut,
        pieces: Sequence[Piece],
        runs: Sequence[Piece],
        like: Sequence[Tensor],
        split: bool,
    ) -> None:
        """Allocate the rows of ``pieces``, one of each section, in the dtypes of ``like``."""
        self._cut, self._split, self._runs = cut, split, runs
        size, layers = cut.peers.size, cut.layers
        # Where all combine all, they must do it alike, and numba may be on some ranks only.
        self._passes = row_passes(like[0].device) if split else RowPasses(gram, combine)
        self.spans = [cut.spans(piece) for piece in pieces]
        self.rows = [like[p.section].new_empty(size, p.stop - p.start) for p in pieces]
        self._inside = [clip(self.spans[run.section], run.start, run.stop) for run in runs]
        self._products = torch.zeros(layers, size, size, dtype=torch.float64, device=like[0].device)
        self.weights = self._cancelled = self._scales = torch.empty(0)

    def begin(self) -> None:
        """Forget the last exchange."""
        self._products.zero_()

    def add(self, index: int) -> None:
        """The rows of one more run are complete."""
        self._passes.gram(self.rows[self._runs[index].section], self._inside[index], self._products)

    def judge(self, scales: Tensor | None) -> Verdict:
        """Learn from all ranks' inner products; ``scales`` are those of this rank's row."""
        peers = self._cut.peers
        self._scales = self._all_scales(scales)
        products = self._products
        products.div_(self._scales[:, :, None]).div_(self._scales[:, None, :])
        peers.total(products, over_group=self._split)
        weights, cancelled = coefficients(products)
        self.weights, self._cancelled = weights, cancelled
        energy = products.diagonal(dim1=1, dim2=2).sum(1)
        return Verdict(energy, orthogonality(products, weights))

    def bounds(self) -> Tensor:
        """No combined value is larger, in units of the largest value that is sent; (layers,)."""
        return (self.weights.abs() / self._scales).sum(1)

    def redo(self, outs: Sequence[Tensor]) -> set[int]:
        """Combine by the explicit tree the layers whose coefficients have lost digits.

        Every rank takes part in the small sums of each level, whatever it holds of the layer.
        """
        layers = self._cancelled.nonzero().flatten().tolist()
        for layer in layers:
            places = [
                (rows[:, s.start : s.stop], out[s.start : s.stop])
                for rows, spans, out in zip(self.rows, self.spans, outs, strict=True)
                for s in spans
                if s.layer == layer
            ]
            nothing = self._scales.new_empty(len(self._scales[layer]), 0)
            wide = torch.cat([nothing, *(rows.double() for rows, _ in places)], dim=1)
            whole = tree(wide.div_(self._scales[layer][:, None]), self._total)
            runs = whole.split([out.numel() for _, out in places]) if places else ()
            for (_, out), run in zip(places, runs, strict=True):
                out.copy_(run)
        return set(layers)

    def combine(self, index: int, outs: Sequence[Tensor], redone: set[int]) -> None:
        """Write the combination of one run to ``outs``, but for the layers ``redone``."""
        section = self._runs[index].section
        spans = [span for span in self._inside[index] if span.layer not in redone]
        self._passes.combine(self.rows[section], spans, self.weights / self._scales, outs[section])

    def _total(self, products: Tensor) -> Tensor:
        return self._cut.peers.total(products, over_group=self._split)

    def _all_scales(self, scales: Tensor | None) -> Tensor:
        peers, layers = self._cut.peers, self._cut.layers
        every = torch.ones(peers.size, layers, dtype=torch.float64, device=self._products.device)
        if scales is not None and peers.group is not None:
            peers.wait(all_gather(every.view(-1), scales, peers.group))
        return every.T.contiguous()
