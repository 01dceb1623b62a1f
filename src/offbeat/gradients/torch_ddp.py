"""DistributedDataParallel of torch in the gradients slot, as a baseline."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from offbeat.comm.process_group import attach_torch_ddp, is_running
from offbeat.exchange import GradientExchange, Saved, Site
from offbeat.settings import above, check_settings


@dataclass(eq=False)
class TorchDDPState:
    """State of :class:`TorchDDP` on one replica; torch holds the rest."""

    site: Site


@final
@dataclass(frozen=True, kw_only=True)
class TorchDDP(GradientExchange[TorchDDPState]):
    """Attaches DistributedDataParallel in place, by torch's composable ``replicate``.

    A baseline for ``offbeat compare``: same script, same counters. In real processes only, over
    the default group; ``detach()`` cannot remove torch's hooks. Bytes are counted as for
    :class:`Mean`; stalled seconds are unknown, because torch waits inside backward.

    Source: Li et al. 2020, "PyTorch Distributed".
    """

    bucket_mb: Annotated[float, above(0, "MiB")] = 25.0
    over: Literal["world"] = "world"
    is_wrapper: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)

    def init(self, site: Site) -> TorchDDPState:
        """Attach torch's reducer to the model; raise ``ValueError`` without a default group."""
        if not is_running():
            raise ValueError(
                "torch_ddp() runs over torch's default group, and there is none in a world of "
                "threads; call torch.distributed.init_process_group() in real processes"
            )
        attach_torch_ddp(site.model, self.bucket_mb)
        return TorchDDPState(site)

    def ready(self, state: TorchDDPState, name: str) -> None:
        """Do nothing: torch has a hook on ``name`` of its own."""

    def complete(self, state: TorchDDPState) -> bool:
        """Return True: torch's own callback completes the exchange."""
        return True

    def finish(self, state: TorchDDPState) -> None:
        """Count the bytes that torch has sent."""
        group = state.site.group
        assert group is not None, "a slot alone in its group is disabled"
        sizes = sum(parameter.nbytes for parameter in state.site.parameters.values())
        group.meter.sent(group.axis, 2 * (group.size - 1) * sizes // group.size)

    def save(self, state: TorchDDPState) -> Saved:
        """Return an empty dict: a resumed run attaches torch's reducer anew."""
        return {}

    def load(self, state: TorchDDPState, saved: Saved) -> None:
        """Do nothing: :meth:`save` returns nothing."""
