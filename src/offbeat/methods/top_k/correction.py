"""What deep gradient compression does to a rank's gradients before they become residuals."""

from dataclasses import dataclass

from torch import Tensor

from offbeat.functional import clip_factor


@dataclass(frozen=True)
class Correction:
    """Local clipping and momentum correction of one rank.

    With ``momentum`` m the velocity u = m u + g is added to the residual instead of the gradient g.
    """

    momentum: float = 0.0
    masking: bool = False  # whether the velocity of an entry that is sent becomes zero
    limit: float | None = None  # the largest norm of a layer's gradient on one rank

    def clipped(self, grad: Tensor, loss: float) -> Tensor:
        """Return a gradient that is scaled by ``loss``, at most ``limit`` long without that."""
        return grad if self.limit is None else grad * clip_factor(grad, self.limit * loss)
