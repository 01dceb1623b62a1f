"""Floor 3: what fills the gradients slot, one final class a file."""

from offbeat.gradients.assumption import deltas
from offbeat.gradients.mean import Mean
from offbeat.gradients.top_k import TopK
from offbeat.gradients.torch_ddp import TorchDDP

__all__ = ["Mean", "TopK", "TorchDDP", "deltas"]
