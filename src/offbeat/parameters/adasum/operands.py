"""All peers' vectors of some pieces of a slice, compared and combined."""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from offbeat.comm.collectives import all_gather
from offbeat.functional import Segments, clip_segments, tree
from offbeat.kernels.dispatch import AdasumPasses, adasum_passes, machine_code
from offbeat.parameters.adasum.reduction import Statistics
from offbeat.parameters.adasum.slices import Piece, SliceLayout


class Operands:
    """One row for each peer, piece by piece, and what is known of all layers.

    ``split``: whether peers hold different pieces, or all the same. Dot products are float64 sums
    of what was sent.
    """

    def __init__(
        self,
        cut: SliceLayout,
        pieces: Sequence[Piece],
        runs: Sequence[Piece],
        like: Sequence[Tensor],
        split: bool,
    ) -> None:
        """Allocate the rows of ``pieces``, one of each section, in the dtypes of ``like``."""
        self._cut, self._split, self._runs = cut, split, runs
        size, layers = cut.peers.size, cut.layers
        self.spans = [cut.spans(piece) for piece in pieces]
        self.rows = [like[p.section].new_empty(size, p.stop - p.start) for p in pieces]
        self._inside = [clip_segments(self.spans[run.section], run.start, run.stop) for run in runs]
        self._products = torch.zeros(layers, size, size, dtype=torch.float64, device=like[0].device)
        self._direct = cut.peers.direct(self._products) if split else None
        self._scales = torch.ones(layers, size, dtype=torch.float64, device=like[0].device)
        self._weights = self._factors = self._cancelled = torch.empty(0)
        self._passes = adasum_passes(compiled=False)
        self._agreed = False

    def begin(self) -> None:
        """Forget the last exchange."""
        if not self._agreed:
            self._passes, self._agreed = self._agree(), True
        self._products.zero_()

    def expect(self) -> None:
        """Post the receives of :meth:`judge` already."""
        if self._direct is not None:
            self._direct.expect()

    def keep(self, mine: Sequence[Tensor]) -> None:
        """This rank's own row of every piece."""
        for rows, vector in zip(self.rows, mine, strict=True):
            rows[self._cut.peers.rank].copy_(vector)

    def add(self, index: int) -> None:
        """The rows of one more run are complete."""
        rows = self.rows[self._runs[index].section]
        self._passes.add_gram(rows, self._inside[index], self._products)

    def judge(self, scales: Tensor | None) -> Statistics:
        """Learn from all ranks' inner products; ``scales`` are those of this rank's row."""
        products = self._products
        if scales is not None:
            self._scales = self._all_scales(scales)
            products.div_(self._scales[:, :, None]).div_(self._scales[:, None, :])
        if self._direct is not None:
            self._cut.peers.wait(self._direct.start())
        else:
            self._total(products)
        self._weights, self._cancelled, energy, orthogonality = self._passes.analyze(products)
        self._factors = self._weights if scales is None else self._weights / self._scales
        return Statistics(energy, orthogonality)

    def bounds(self) -> Tensor:
        """No combined value is larger, in units of the largest value that is sent; (layers,)."""
        return (self._weights.abs() / self._scales).sum(1)

    def redo(self, outs: Sequence[Tensor]) -> set[int]:
        """Combine by the explicit tree the layers whose coefficients have lost digits.

        Every rank takes part in the small sums of each level, whatever it holds of the layer.
        """
        layers = list(compress(range(self._cut.layers), self._cancelled.tolist()))
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
        section, spans = self._runs[index].section, self._inside[index]
        if redone:
            spans = Segments(span for span in spans if span.layer not in redone)
        self._passes.combine_rows(self.rows[section], spans, self._factors, outs[section])

    def _agree(self) -> AdasumPasses:
        """Passes that round alike on all ranks: numba may be on some only, or make other code.

        Where all combine all they would differ otherwise, and from weights that differ follow
        layers to combine again, in messages that some wait for and others do not send.
        """
        if self._products.is_cuda:  # there on all ranks, and NCCL could not carry the question
            return adasum_passes(compiled=False)
        said = machine_code()
        return adasum_passes(compiled=self._cut.peers.alike(said) and said != "")

    def _total(self, products: Tensor) -> Tensor:
        return self._cut.peers.total(products, over_group=self._split)

    def _all_scales(self, scales: Tensor) -> Tensor:
        peers, layers = self._cut.peers, self._cut.layers
        every = torch.ones(peers.size, layers, dtype=torch.float64, device=self._products.device)
        if peers.group is not None:
            peers.wait(all_gather(every.view(-1), scales, peers.group))
        return every.T.contiguous()
