"""Slices of flat tensors as tensors by parameter name, as they stand in checkpoints."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from offbeat.exchange import Site
from offbeat.functional import Layout, pack


def by_name(site: Site, layout: Layout, slices: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return copies by parameter name, in the dtype of sums, with zeros outside of the slices."""
    flat = layout.wide("cpu", site.chunks)
    pack([site.slice(part) for part in flat], slices)
    return layout.views(flat)


def slices_of(site: Site, layout: Layout, named: Mapping[str, Tensor]) -> list[Tensor]:
    """Return this rank's slices of what :func:`by_name` returned."""
    flat = layout.wide(site.device, site.chunks)
    views = layout.views(flat)
    pack(views.values(), [named[name] for name in views])
    return [site.slice(part) for part in flat]
