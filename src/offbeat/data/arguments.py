"""The arguments of a sampler, which are the same on all ranks."""

import json
from collections.abc import Mapping
from typing import Any

from offbeat.data.generation import Layout
from offbeat.data.log import Training


def require_enough(length: int, ranks: int, layout: Layout) -> None:
    """Raise ``ValueError`` if an epoch has not one step."""
    batches = ranks * layout.accumulate
    needed = batches * (layout.batch_size if layout.drop_last else 1)
    if length < needed:
        raise ValueError(
            f"length={length}, expected {needed} or more for one step of {batches} batches with "
            f"batch_size={layout.batch_size} and drop_last={layout.drop_last}; use fewer ranks or "
            "smaller batches"
        )


def require_weights(most: int, layout: Layout, replica: Training) -> None:
    """Raise ``ValueError`` unless batches may have other sizes than ``layout`` says."""
    if not isinstance(most, int) or most < layout.batch_size:
        raise ValueError(
            f"most={most!r}, expected the largest batch of a rank: batch_size="
            f"{layout.batch_size} or more, or None for equal batches"
        )
    if replica.weighting.now is None:
        raise ValueError(
            f"most={most} makes batches of different sizes, and a mean must weigh them: use "
            "replicate(..., weighted=True) and replica.set_weight(len(batch))"
        )


def require_alike(replica: Training, arguments: Mapping[str, Any], fault: str) -> None:
    """Raise the same ``ValueError`` on all ranks for a fault of one, or for other arguments.

    All ranks call. One gather, when the sampler is made.
    """
    found = [json.loads(text) for text in replica.gather(json.dumps([fault, repr(arguments)]))]
    where = [f"rank {rank}: " if len(found) > 1 else "" for rank in replica.world.ranks]
    for here, (reason, _) in zip(where, found, strict=True):
        if reason:
            raise ValueError(here + reason)
    for here, (_, text) in zip(where, found, strict=True):
        if text != found[0][1]:
            raise ValueError(
                f"{here}ElasticSampler got {text}, but {where[0]}{found[0][1]}; use the same data "
                "set and settings on all ranks"
            )
