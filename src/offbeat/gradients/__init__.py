"""Floor 3: what fills the gradients slot, one final class a file."""

from offbeat.gradients.mean import Mean
from offbeat.gradients.torch_ddp import TorchDDP

__all__ = ["Mean", "TorchDDP"]
