"""Clipping of gradients by their norm, without a synchronization with an accelerator."""

import torch
from torch import Tensor

from offbeat.functional.packing import accumulation_dtype


def clip_factor(grad: Tensor, limit: float) -> Tensor:
    r"""Return the factor that shortens a gradient to the norm ``limit``; 1 if it is no longer.

    .. math:: \min(1, \theta / \|g\|)

    A tensor () on the gradient's device, in float32 at least. NaN where the norm is not finite, so
    that a gradient that overflows is not taken for a small one.

    >>> clip_factor(torch.tensor([3.0, 4.0]), limit=1.0), clip_factor(torch.zeros(2), limit=1.0)
    (tensor(0.2000), tensor(1.))
    """
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=accumulation_dtype(grad.dtype))
    return (limit / norm).clamp_(max=1.0).add_(norm - norm)
