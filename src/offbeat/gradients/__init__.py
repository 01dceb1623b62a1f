"""Floor 3: what fills the gradients slot, one final class a file."""

from offbeat.gradients.mean import Mean

__all__ = ["Mean"]
