"""Recipes that exchange gradients alone, and the baselines beside them."""

from collections.abc import Mapping
from typing import Literal

from offbeat.exchange import Algorithm
from offbeat.kernels.dispatch import Select
from offbeat.methods import Mean, TopK, TorchDDP
from offbeat.methods.top_k.density import OfLayer
from offbeat.recipes.recipe import recipe


@recipe
def ddp(
    wire: Literal["bf16"] | None = None, *, bucket_mb: float = 25.0, broadcast_buffers: bool = True
) -> Algorithm:
    """Average the gradients of all ranks in every backward (the baseline).

    The buffers of rank 0 reach all ranks in the same backward, unless ``broadcast_buffers=False``.
    See :class:`offbeat.methods.Mean`.

    >>> ddp(wire="bf16").parameters is None
    True
    """
    return Algorithm(Mean(wire=wire, bucket_mb=bucket_mb, broadcast_buffers=broadcast_buffers))


@recipe
def lags(
    density: float | Literal["adaptive"] | Mapping[str, float] | OfLayer = 0.001,
    *,
    max_ratio: float = 1000.0,
    selection: Literal["sampled", "exact"] | Select = "sampled",
    momentum: float = 0.0,
    masking: bool = False,
    clip_norm: float | None = None,
    warmup: int | None = None,
    wire: Literal["bf16", "fp16"] | None = None,
    message_mb: float = 1 / 16,
    units: Literal["lr", "gradient"] | None = None,
    retune: int = 1000,
    measure: bool = False,
    broadcast_buffers: bool = False,
) -> Algorithm:
    """Exchange the largest gradients of each layer in every backward, the others later (LAGS-SGD).

    Pass ``replicate(..., optimizer=optimizer)``: with ``torch.optim.SGD`` a gradient is scaled by
    the learning rate of the step in which it was computed, as in the paper. See
    :class:`offbeat.methods.TopK`.

    >>> lags({"head.*": 0.01, "*": 0.001}).gradients.density
    {'head.*': 0.01, '*': 0.001}
    """
    top_k = TopK(
        density=density,
        selection=selection,
        momentum=momentum,
        masking=masking,
        clip_norm=clip_norm,
        warmup=warmup,
        wire=wire,
        message_mb=message_mb,
        units=units,
        max_ratio=max_ratio,
        retune=retune,
        measure=measure,
        broadcast_buffers=broadcast_buffers,
    )
    return Algorithm(top_k)


@recipe
def slgs(density: float = 0.001, *, broadcast_buffers: bool = False) -> Algorithm:
    """Exchange the largest gradients of the whole model after backward (SLGS-SGD).

    The baseline of :func:`lags`: the same selection and residuals, without overlap. See
    :class:`offbeat.methods.TopK`.

    >>> slgs().gradients.scope
    'model'
    """
    return Algorithm(TopK(density=density, scope="model", broadcast_buffers=broadcast_buffers))


@recipe
def alone() -> Algorithm:
    """Exchange nothing: every rank trains by itself (a lower bound on the time per step).

    For comparison only: the models of the ranks drift apart.

    >>> alone().gradients is None
    True
    """
    return Algorithm()


@recipe
def torch_ddp(*, bucket_mb: float = 25.0) -> Algorithm:
    """Average gradients with torch's own DistributedDataParallel, for comparison.

    See :class:`offbeat.methods.TorchDDP`.

    >>> torch_ddp().gradients
    TorchDDP(bucket_mb=25.0, over='world')
    """
    return Algorithm(TorchDDP(bucket_mb=bucket_mb))
