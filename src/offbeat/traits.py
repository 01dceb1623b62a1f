"""What must stay as it was at the attach: hooks, messages and views depend on it."""

import torch
from torch import nn

Traits = dict[str, tuple[int, bool, torch.dtype, torch.device]]


def traits(model: nn.Module) -> Traits:
    """Of each parameter who it is, whether it is trained, its dtype and its device."""
    return {n: (id(p), p.requires_grad, p.dtype, p.device) for n, p in model.named_parameters()}


def changed(before: Traits, now: Traits) -> list[str]:
    """The names of parameters that were replaced, added, removed, frozen, cast or moved."""
    names = {**before, **now}
    return [name for name in names if before.get(name) != now.get(name)]


def fault(before: Traits, model: nn.Module, rank: int) -> ValueError | None:
    """What has changed since the attach and must not, if anything has."""
    names = changed(before, traits(model))
    if not names:
        return None
    return ValueError(
        f"rank {rank}: parameters {names[:3]} were replaced, added, removed, frozen, unfrozen, "
        "cast or moved since replicate(); call finish() and detach() before such a change and "
        "replicate() again after it"
    )
