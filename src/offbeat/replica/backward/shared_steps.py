"""Optimizers whose step communicates: it must not mix ranks with different gradients."""

from collections.abc import Collection

from torch.optim import Optimizer

from offbeat.exchange import BoundGradients
from offbeat.platform.process_group import world_ranks


def shared_step_fault(optimizer: Optimizer, slot: BoundGradients) -> str | None:
    """Return why an optimizer that shards its state among ranks cannot step here, or None."""
    # As torch's ZeroRedundancyOptimizer: each rank steps a part of the parameters, by its own
    # gradients, and sends the result to the others.
    group = getattr(optimizer, "process_group", None)
    if not hasattr(optimizer, "consolidate_state_dict") or group is None:
        return None
    if have_equal_gradients(world_ranks(group), slot):
        return None
    return (
        f"{type(optimizer).__name__} steps each parameter on one of the ranks "
        f"{[*world_ranks(group)]} for all of them, and their gradients differ; use offbeat.ddp(), "
        "or an optimizer that steps all parameters on every rank"
    )


def have_equal_gradients(ranks: Collection[int], slot: BoundGradients) -> bool:
    """Return whether the gradients slot leaves the same gradients on all of ``ranks``."""
    group = slot.site.group if slot.site is not None else None
    return len(ranks) == 1 or (group is not None and {*ranks} <= {*group.ranks})
