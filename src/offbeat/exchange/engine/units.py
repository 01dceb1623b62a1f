"""Units of residuals, and the scale of each gradient in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

_LEAST = 1e-30  # learning rate, at a loss scale of 1


class Scale(NamedTuple):
    r"""Learning rate of one parameter (or 1) and loss scale, in one backward.

    A gradient g enters the residual as :math:`f \alpha g / s`, with the factor f of this rank's
    weight (1 if all are equal), and what is sent comes back as :math:`s / \alpha` times that. So
    residuals of all ranks count alike, whatever their weights were and will be.
    """

    rate: float
    loss: float
    weight: float = 1.0

    @property
    def to_residual(self) -> float:
        """The factor from ``.grad`` to the residual."""
        return self.weight * self.rate / self.loss

    @property
    def to_grad(self) -> float:
        """The factor from the residual to ``.grad``; 0 at a learning rate of 0: nothing is sent.

        Nor at one so small that the factor would overflow in float32.
        """
        return self.loss / self.rate if self.rate > self.loss * _LEAST else 0.0


@dataclass(eq=False)
class Units:
    """Units of the residuals: learning rate times gradient, or gradient."""

    # Of each parameter the optimizer and the index of its group; None for gradient units.
    groups: Mapping[str, tuple[Optimizer, int] | None]
    scaler: torch.amp.GradScaler | None
    scales: dict[str, Scale] = field(default_factory=dict)  # of the gradients of this backward

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        units: Literal["lr", "gradient"] | None,
    ) -> "Units":
        """Read learning rates from plain SGD optimizers, or as ``units`` says from all or none."""
        places = {
            id(parameter): (optimizer, index)
            for optimizer in optimizers
            if units == "lr" or (units is None and type(optimizer) is SGD)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        return cls({n: places.get(id(p)) for n, p in parameters.items()}, scaler)

    def read(self, weight: float = 1.0) -> None:
        """Read the scales of a backward that begins."""
        loss_scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        # Looked up anew each time: load_state_dict() replaces an optimizer's groups.
        self.scales = {
            name: Scale(
                float(place[0].param_groups[place[1]]["lr"]) if place else 1.0, loss_scale, weight
            )
            for name, place in self.groups.items()
        }


def optimizer_fault(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    units: Literal["lr", "gradient"] | None,
    momentum: float,
) -> str | None:
    """Return what makes the given optimizers unfit, or None."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    covered = {id(parameter) for group in groups for parameter in group["params"]}
    lost = [name for name, p in parameters.items() if id(p) not in covered]
    if optimizers and lost:
        return f"parameter {lost[0]!r} is in none of the given optimizers; pass all optimizers"
    if units == "lr" and not optimizers:
        return "units='lr' needs the learning rate; pass replicate(..., optimizer=optimizer)"
    if momentum and any(group.get("momentum") or "betas" in group for group in groups):
        return (
            f"momentum={momentum} in the exchange and momentum in the optimizer would act twice; "
            "use torch.optim.SGD with momentum=0, or momentum=0 in the recipe"
        )
    return None
