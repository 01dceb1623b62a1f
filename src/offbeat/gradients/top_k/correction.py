"""What deep gradient compression does to a rank's gradients before they become residuals."""

from dataclasses import dataclass

from torch import Tensor

from offbeat.functional import clip_factor


@dataclass(frozen=True)
class Correction:
    """Local clipping and momentum correction of one rank.

    Attributes:
        momentum: factor m of the velocity u = m u + g, which is added to the residual instead of
            the gradient g; 0 for none.
        masking: whether the velocity of an entry that is sent becomes zero.
        limit: the largest norm of a layer's gradient on one rank; None for any.
    """

    momentum: float = 0.0
    masking: bool = False
    limit: float | None = None

    def clipped(self, grad: Tensor, loss: float) -> Tensor:
        """Return a gradient that is scaled by ``loss``, at most ``limit`` long without that."""
        return grad if self.limit is None else grad * clip_factor(grad, self.limit * loss)
