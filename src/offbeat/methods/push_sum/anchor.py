"""The model before an update, from which push-sum counts it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.functional import Layout, flat_view


def new_anchor(site: Site, layout: Layout) -> list[Tensor]:
    """Return zeros for an anchor, flat by section, in the dtype of sums."""
    return [site.slice(part).clone() for part in layout.wide(site.device, site.chunks)]


def works_in_place(site: Site) -> bool:
    """Return whether messages can be computed from the parameters where they are in memory."""
    parameters = site.parameters.values()
    return site.inside is None and all(
        p.device == site.device and flat_view(p) is not None for p in parameters
    )


def weigh_updates(
    pieces: Iterable[tuple[Tensor, int, slice]], anchor: Sequence[Tensor], samples: float
) -> None:
    r"""Multiply the updates of flat pieces by ``samples``: :math:`z \leftarrow a + s (z - a)`."""
    for z, section, part in pieces:
        a = anchor[section][part]
        z.copy_(torch.lerp(a, z.to(a.dtype), samples))
