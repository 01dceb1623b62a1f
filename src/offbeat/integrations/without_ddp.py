"""A model that Hugging Face Accelerate prepares without DistributedDataParallel."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

from offbeat.replica.replica import Replica

if TYPE_CHECKING:
    from accelerate import Accelerator


def require_whole_models(accelerator: "Accelerator") -> None:
    """Raise ``ValueError`` if models are divided, or for options of DDP that they do not get."""
    kind = accelerator.distributed_type.value
    if not kind.startswith(("NO", "MULTI_")):
        raise ValueError(
            f"the accelerator is configured for {kind}, and offbeat exchanges whole models; "
            "configure plain data parallelism (MULTI_GPU or MULTI_CPU), or start with torchrun"
        )
    wrapper = accelerator.ddp_handler
    hook = getattr(getattr(wrapper, "comm_hook", None), "value", "no")  # since Accelerate 0.30
    if wrapper is not None and not (wrapper.broadcast_buffers and hook == "no"):
        raise ValueError(
            "DistributedDataParallelKwargs with broadcast_buffers=False or a comm_hook configures "
            "a wrapper that the model does not get; remove them, and under the algorithm ddp pass "
            "offbeat.ddp(broadcast_buffers=False), or offbeat.ddp(wire='bf16') to compress"
        )


@contextmanager
def without_ddp(accelerator: "Accelerator") -> Iterator[None]:
    """Prepare models inside the block as those that are only evaluated.

    They get their device, autocast and ``torch.compile``, and are not wrapped.
    """
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    try:
        yield
    finally:
        del accelerator.prepare_model  # the method of the class is visible again


def no_sync(model: Any) -> AbstractContextManager[None]:
    """Enter ``model.no_sync``, as an accelerator does that knows of other processes."""
    context: AbstractContextManager[None] = getattr(model, "no_sync", nullcontext)()
    return context


@final
class NoSync:
    """The attribute ``no_sync`` of a model, which Accelerate enters while it accumulates."""

    def __init__(self, *replicas: Replica) -> None:
        """Act on the backwards of ``replicas``."""
        self.replicas = replicas

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Exchange no gradients inside the block."""
        for replica in self.replicas:
            replica.set_requires_sync(False)
        try:
            yield
        finally:
            for replica in self.replicas:
                replica.set_requires_sync(True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy as a context that does nothing: a copy of the model is no replica."""
        return partial, (nullcontext,)
