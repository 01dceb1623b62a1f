"""DistributedDataParallel of torch in the gradients slot, as a baseline."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from offbeat.exchange import BoundGradients, GradientExchange, Site
from offbeat.platform.process_group import attach_torch_ddp, is_running
from offbeat.settings import above, check_settings


@final
@dataclass(frozen=True, kw_only=True)
class TorchDDP(GradientExchange):
    """Attaches DistributedDataParallel in place.

    A baseline for ``offbeat compare``: same script, same counters. In real processes only, over
    the default group. Bytes are counted as for :class:`Mean`; stalled seconds are unknown, because
    torch waits inside backward.

    Source: Li et al. 2020, "PyTorch Distributed".
    """

    bucket_mb: Annotated[float, above(0, "MiB")] = 25.0
    over: Literal["world"] = "world"
    is_wrapper: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self)

    def bind(self, site: Site) -> "BoundTorchDDP":
        """Attach torch's reducer to the model; raise ``ValueError`` without a default group."""
        if not is_running():
            raise ValueError(
                "torch_ddp() runs over torch's default group, and there is none in a world of "
                "threads; call torch.distributed.init_process_group() in real processes"
            )
        remove = attach_torch_ddp(site.model, site.registered.values(), self.bucket_mb)
        return BoundTorchDDP(site, remove)


@dataclass(eq=False)
class BoundTorchDDP(BoundGradients):
    """:class:`TorchDDP` on one replica; torch holds the state, and attaches anew to resume."""

    site: Site
    remove: Callable[[], None]

    def detach(self) -> None:
        """Remove torch's reducer and hooks."""
        self.remove()

    def ready(self, name: str) -> None:
        """Do nothing: torch has a hook on ``name`` of its own."""

    def complete(self) -> bool:
        """Return True: torch's own callback completes the exchange."""
        return True

    def finish(self) -> None:
        """Count the bytes that torch has sent."""
        group = self.site.group
        assert group is not None, "a slot alone in its group is disabled"
        sizes = sum(parameter.nbytes for parameter in self.site.parameters.values())
        group.meter.sent(group.axis, 2 * (group.size - 1) * sizes // group.size)
