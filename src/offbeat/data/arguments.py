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


def require_weights(
    most: int | None, window: int | None, layout: Layout, replica: Training
) -> None:
    """Raise ``ValueError`` unless ranks may train on other samples than ``layout`` says."""
    if most is not None and window is not None:
        raise ValueError(
            f"most={most} and window={window}: slow ranks get smaller batches or fewer; pass one"
        )
    if most is not None and (not isinstance(most, int) or most < layout.batch_size):
        raise ValueError(
            f"most={most!r}, expected the largest batch of a rank: batch_size="
            f"{layout.batch_size} or more, or None for equal batches"
        )
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window={window!r}, expected a number of steps, 1 or more")
    name, value = ("most", most) if window is None else ("window", window)
    if replica.weighting.now is None:
        raise ValueError(
            f"{name}={value} makes ranks train on different numbers of samples, and a mean must "
            "weigh them: use replicate(..., weighted=True) and replica.set_weight(len(batch))"
        )
    if window is not None and replica.algorithm.gradients is not None:
        raise ValueError(
            f"window={window} with {replica.algorithm}, which exchanges gradients in each step; "
            "use most=, or a method such as local_sgd() that exchanges parameters alone"
        )


def require_alike(replica: Training, arguments: Mapping[str, Any], fault: str) -> None:
    """Raise the same ``ValueError`` on all ranks for a fault of one, or for other arguments.

    All ranks call. One gather, when the sampler is made.
    """
    mine = json.dumps([f"rank {replica.world.rank}: ", fault, repr(arguments)])
    found = [json.loads(text) for text in replica.gather(mine)]
    for rank, reason, _ in found:
        if reason:
            raise ValueError((rank if len(found) > 1 else "") + reason)
    first, _, usual = found[0]
    for rank, _, text in found:
        if text != usual:
            raise ValueError(
                f"{rank}ElasticSampler got {text}, but {first}{usual}; use the same data set and "
                "settings on all ranks"
            )


def require_same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` on a rank that joins, unless its settings are those of the others."""
    for name, value in mine.items():
        if theirs[name] != value:
            raise ValueError(
                f"this rank joins with {name}={value}, but the others have {name}={theirs[name]}; "
                "make the same ElasticSampler on all ranks"
            )
