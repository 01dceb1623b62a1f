"""The short messages of a fragment: in 16 or 8 bits, or its largest entries."""

from collections.abc import Sequence

from torch import Tensor

from offbeat.exchange import Site
from offbeat.functional import Layout
from offbeat.functional.messages.narrowing import Narrow
from offbeat.methods.outer.narrow_mean import NarrowMean
from offbeat.methods.outer.sparse_mean import Sparse, SparseMean

Wire = Narrow | Sparse
# Both are equal on all members bit for bit, and what a message loses goes in the next.
LossyMean = NarrowMean | SparseMean


def lossy_means(
    wire: Wire, anchor: Sequence[Tensor], layout: Layout, site: Site
) -> Sequence[LossyMean]:
    """Return what averages the slices of ``anchor`` in short messages; none without a group."""
    group = site.group
    if group is None:
        return []
    if not isinstance(wire, Sparse):
        return [NarrowMean.of(part, wire, group) for part in anchor]
    first = site.inside.rank if site.inside is not None else 0
    starts = [first * part.numel() for part in anchor]
    segments = [
        layout.segments(section, start, start + part.numel())
        for section, (start, part) in enumerate(zip(starts, anchor, strict=True))
    ]
    return [SparseMean.of(p, wire, s, group) for p, s in zip(anchor, segments, strict=True)]
