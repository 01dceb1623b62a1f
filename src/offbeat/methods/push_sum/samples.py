"""What the samples of a step make of its update, and of the weight of push-sum."""

from collections.abc import Iterable

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.functional import weight_growth
from offbeat.transport.small_gathers import gather_numbers


def entering(
    site: Site, weight: float, given: float, weighted_updates: bool
) -> tuple[float, float | None]:
    """Return what the weight grows by, and which share of the update then counts, or None.

    ``given``: by how much the weights have grown for the samples of a step. In a node all call.
    """
    grown, share = 0.0, 1.0 if weighted_updates else None
    if (weights := site.weights) is not None:
        samples = sum(n for (n,) in gather_numbers([weights.samples.now], site.inside))
        grown = weight_growth(weight, samples, given)
        share = share or samples / (weight + grown)
    return grown, share


def is_updated(site: Site, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether an optimizer has stepped since the last exchange: any z is not its anchor.

    In a node all call, and any of them counts.
    """
    mine = any(not torch.equal(z, anchor.to(z.dtype)) for z, anchor in pairs)
    return any(other for (other,) in gather_numbers([mine], site.inside))
