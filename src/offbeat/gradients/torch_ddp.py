"""Torch's own DistributedDataParallel in the gradients slot, to compare with."""

from dataclasses import dataclass
from typing import Annotated, Literal, final

import torch.distributed as dist
from torch.distributed._composable.replicate import replicate

from offbeat.exchange import GradientExchange, Saved, Site
from offbeat.settings import above, check_settings


@dataclass(eq=False)
class TorchDDPState:
    """Nothing of ours: torch keeps it."""

    site: Site


@final
@dataclass(frozen=True, kw_only=True)
class TorchDDP(GradientExchange[TorchDDPState]):
    """DistributedDataParallel, attached in place by torch's composable ``replicate``.

    A baseline for ``offbeat compare``: same script, same counters. In real processes only, over
    the default group; ``detach()`` cannot remove torch's hooks. Bytes are counted as for
    :class:`Mean`; time spent waiting is not known, because torch waits inside backward.

    Source: Li et al. 2020, "PyTorch Distributed".
    """

    bucket_mb: Annotated[float, above(0, "MiB")] = 25.0
    over: Literal["world"] = "world"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)

    def init(self, site: Site) -> TorchDDPState:
        """Hand the model over to torch."""
        if not dist.is_initialized():
            raise ValueError(
                "torch_ddp() runs over torch's default group, and there is none in a world of "
                "threads; call torch.distributed.init_process_group() in real processes"
            )
        replicate(site.model, bucket_cap_mb=self.bucket_mb)
        return TorchDDPState(site)

    def ready(self, state: TorchDDPState, name: str) -> None:
        """Torch sees it too."""

    def complete(self, state: TorchDDPState) -> bool:
        """Torch's own callback ends the exchange."""
        return True

    def finish(self, state: TorchDDPState) -> None:
        """Count what torch has sent."""
        group = state.site.group
        assert group is not None, "a slot alone in its group is replaced by nothing"
        sizes = sum(parameter.nbytes for parameter in state.site.parameters.values())
        group.meter.sent(group.axis, 2 * (group.size - 1) * sizes // group.size)

    def save(self, state: TorchDDPState) -> Saved:
        """Nothing of ours."""
        return {}

    def load(self, state: TorchDDPState, saved: Saved) -> None:
        """Nothing to take over."""
