"""Rounding to 16-bit messages with error feedback."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.functional import Segment
from offbeat.functional.messages.sixteen_bits import DTYPES, fitting_scales


class Rounding:
    r"""Rounds vectors to 16-bit messages, and adds the error to the next vectors.

    .. math:: m = round(s\,(u + e)), \qquad e \leftarrow u + e - m / s

    With "fp16" the power of two s keeps a layer's values high in the range of the format,
    whatever their magnitude; with "bf16" there is none. Extra memory: the 16-bit copy and the
    error e.
    """

    def __init__(
        self,
        slices: Sequence[Tensor],
        segments: Sequence[Sequence[Segment]],
        layers: int,
        wire: str,
    ) -> None:
        """Allocate for vectors like ``slices``, whose layers are at ``segments``."""
        self.wire, self._spans, device = wire, segments, slices[0].device
        self.messages = [
            torch.empty_like(part, dtype=DTYPES[wire] if part.dtype.itemsize > 2 else part.dtype)
            for part in slices
        ]
        self.errors = [torch.zeros_like(part) for part in slices]
        scales = torch.ones(layers, dtype=torch.float64, device=device)
        self.scales = scales if wire == "fp16" else None

    def cast(self, slices: Sequence[Tensor], scales: Tensor | None = None) -> None:
        """Add the last error to ``slices``, and round them; by default with fitting ``scales``."""
        for part, error in zip(slices, self.errors, strict=True):
            part.add_(error)
        if self.scales is None:
            for part, message in zip(slices, self.messages, strict=True):
                message.copy_(part)
            return
        if scales is None:
            scales = self._fitting(slices, self.scales)
        self.scales = scales
        for part, message, segments in zip(slices, self.messages, self._spans, strict=True):
            message.zero_()
            for s in segments:
                scaled = part[s.start : s.stop] * scales[s.layer].to(part.dtype)
                message[s.start : s.stop] = scaled

    def keep_errors(self, slices: Sequence[Tensor]) -> None:
        """Store the error of the last :meth:`cast` of ``slices``."""
        self.widen(self.errors, self.scales)
        for part, error in zip(slices, self.errors, strict=True):
            torch.sub(part, error, out=error)

    def widen(self, out: Sequence[Tensor], scales: Tensor | None) -> None:
        """Write the messages to ``out``, each layer divided by its entry of ``scales``, if any."""
        factors = None if scales is None else 1 / scales
        for message, part, segments in zip(self.messages, out, self._spans, strict=True):
            part.copy_(message)
            if factors is not None:
                for s in segments:
                    part[s.start : s.stop].mul_(factors[s.layer])

    def forget(self) -> None:
        """Set the errors to zero."""
        for error in self.errors:
            error.zero_()

    def _fitting(self, slices: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the scales that fit the layers' largest values."""
        runs = [
            (s.layer, part[s.start : s.stop])
            for part, segments in zip(slices, self._spans, strict=True)
            for s in segments
        ]
        largest = torch.zeros_like(like)
        if runs:
            norms = torch._foreach_norm([run for _, run in runs], ord=torch.inf)
            layers = torch.tensor([layer for layer, _ in runs], device=like.device)
            largest.scatter_reduce_(0, layers, torch.stack(norms).double(), "amax")
        return fitting_scales(largest)
