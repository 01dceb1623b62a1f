"""The vectors of all participants: their inner products and their combination."""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from offbeat.functional import Segments, clip_segments, tree
from offbeat.kernels.dispatch import AdasumPasses, adasum_passes, machine_code
from offbeat.methods.adasum.reduction import Statistics
from offbeat.methods.adasum.slice_layout import Piece, SliceLayout
from offbeat.transport.collectives import all_gather


class Operands:
    """The rows of all P participants, a matrix (P, elements) for each piece."""

    def __init__(
        self,
        layout: SliceLayout,
        pieces: Sequence[Piece],
        runs: Sequence[Piece],
        like: Sequence[Tensor],
        split: bool,
    ) -> None:
        """Allocate the rows of ``pieces``, one of each section, in the dtypes of ``like``.

        ``split``: participants hold different pieces, not all the same.
        """
        self._layout, self._split, self._runs = layout, split, runs
        size, layers = layout.participants.size, layout.layers
        self.segments = [layout.segments(piece) for piece in pieces]
        self.rows = [like[p.section].new_empty(size, p.stop - p.start) for p in pieces]
        self._inside = [
            clip_segments(self.segments[run.section], run.start, run.stop) for run in runs
        ]
        self._products = torch.zeros(layers, size, size, dtype=torch.float64, device=like[0].device)
        self._sum = layout.participants.prepared(self._products) if split else None
        self._scales = torch.ones(layers, size, dtype=torch.float64, device=like[0].device)
        self._weights = self._factors = self._cancelled = torch.empty(0, device="cpu")
        self._passes = adasum_passes(like[0].device, compiled=False)
        self._agreed = False

    def begin(self) -> None:
        """Start a new exchange."""
        if not self._agreed:
            self._passes, self._agreed = self._common_passes(), True
        self._products.zero_()

    def expect(self) -> None:
        """Post the receives of :meth:`analyze` early."""
        if self._sum is not None:
            self._sum.expect()

    def keep(self, mine: Sequence[Tensor]) -> None:
        """Store this rank's own row of every piece."""
        for rows, vector in zip(self.rows, mine, strict=True):
            rows[self._layout.participants.rank].copy_(vector)

    def add(self, index: int) -> None:
        """Add the inner products of one more run, whose rows are complete."""
        rows = self.rows[self._runs[index].section]
        self._passes.add_gram(rows, self._inside[index], self._products)

    def analyze(self, scales: Tensor | None) -> Statistics:
        """Sum all ranks' inner products, of rows that were multiplied by ``scales`` (layers,)."""
        products, peers = self._products, self._layout.participants
        if scales is not None:
            every = products.new_ones(peers.size, len(scales))
            if peers.group is not None:
                peers.wait(all_gather(every.view(-1), scales, peers.group))
            self._scales = every.T.contiguous()
            products.div_(self._scales[:, :, None]).div_(self._scales[:, None, :])
        if self._sum is not None:
            self._sum.add(peers.wait)
        else:
            self._total(products)
        self._weights, self._cancelled, energy, orthogonality = self._passes.analyze(products)
        self._factors = self._weights if scales is None else self._weights / self._scales
        return Statistics(energy, orthogonality)

    def bounds(self) -> Tensor:
        """Return bounds (layers,) of combined values, in units of the largest sent value."""
        return (self._weights.abs() / self._scales).sum(1)

    def redo(self, outs: Sequence[Tensor]) -> set[int]:
        """Combine the layers whose coefficients have lost digits by the tree, and return them."""
        layers = list(compress(range(self._layout.layers), self._cancelled.tolist()))
        for layer in layers:  # all ranks take part in each sum, also those without elements of it
            places = [
                (rows[:, s.start : s.stop], out[s.start : s.stop])
                for rows, segments, out in zip(self.rows, self.segments, outs, strict=True)
                for s in segments
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
        """Write the combination of one run to ``outs``, except for the layers ``redone``."""
        section, segments = self._runs[index].section, self._inside[index]
        if redone:
            segments = Segments(segment for segment in segments if segment.layer not in redone)
        self._passes.combine_rows(self.rows[section], segments, self._factors, outs[section])

    def _common_passes(self) -> AdasumPasses:
        """Return passes that round alike on all ranks."""
        # numba or Triton may be missing on some ranks, or generate other code there. Weights that
        # differ in the last bit may decide differently which layers are combined again, and then
        # some ranks wait for messages that others do not send.
        device = self._products.device
        said = machine_code(device)
        alike = self._layout.participants.alike(said, device)
        return adasum_passes(device, compiled=alike and said != "")

    def _total(self, products: Tensor) -> Tensor:
        return self._layout.participants.total(products, over_group=self._split)
