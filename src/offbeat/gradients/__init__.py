"""What fills the gradients slot: exchanges inside backward."""

from offbeat.gradients.mean import Mean
from offbeat.gradients.top_k.assumption import deltas
from offbeat.gradients.top_k.top_k import TopK
from offbeat.gradients.torch_ddp import TorchDDP

__all__ = ["Mean", "TopK", "TorchDDP", "deltas"]
