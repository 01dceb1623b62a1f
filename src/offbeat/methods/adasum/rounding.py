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
    whatever their magnitude, with "bf16" it is 1. Extra memory: the 16-bit copy and the error e.
    """

    def __init__(
        self,
        slices: Sequence[Tensor],
        segments: Sequence[Sequence[Segment]],
        layers: int,
        wire: str,
    ) -> None:
        """Allocate for vectors like ``slices``, whose layers are at ``segments``."""
        dtype = DTYPES[wire]
        self.wire, self.scaled = wire, wire == "fp16"
        self.messages = [
            torch.empty_like(part, dtype=dtype if part.dtype.itemsize > 2 else part.dtype)
            for part in slices
        ]
        self.errors = [torch.zeros_like(part) for part in slices]
        self._spans = segments
        self.scales = torch.ones(layers, dtype=torch.float64, device=slices[0].device)

    def cast(self, slices: Sequence[Tensor], scales: Tensor | None = None) -> None:
        """Add the last error to ``slices``, in place, and round them into ``messages``.

        ``scales`` fit the layers' largest values unless given.
        """
        for part, error in zip(slices, self.errors, strict=True):
            part.add_(error)
        if self.scaled:
            self.scales = _fitting(slices, self._spans, self.scales) if scales is None else scales
            for part, message, segments in zip(slices, self.messages, self._spans, strict=True):
                message.zero_()
                for s in segments:
                    scaled = part[s.start : s.stop] * self.scales[s.layer].to(part.dtype)
                    message[s.start : s.stop] = scaled
        else:
            for part, message in zip(slices, self.messages, strict=True):
                message.copy_(part)

    def keep_errors(self, slices: Sequence[Tensor]) -> None:
        """Store the error of the last :meth:`cast` of ``slices``."""
        widen(self.messages, self._spans, self._factors(), self.errors)
        for part, error in zip(slices, self.errors, strict=True):
            torch.sub(part, error, out=error)

    def forget(self) -> None:
        """Set the errors to zero."""
        for error in self.errors:
            error.zero_()

    def _factors(self) -> Tensor | None:
        return 1 / self.scales if self.scaled else None


def widen(
    messages: Sequence[Tensor],
    segments: Sequence[Sequence[Segment]],
    factors: Tensor | None,
    out: Sequence[Tensor],
) -> None:
    """Write messages to ``out``, each layer multiplied by its entry of ``factors``, if any."""
    for message, part, inside in zip(messages, out, segments, strict=True):
        part.copy_(message)
        if factors is not None:
            for s in inside:
                part[s.start : s.stop].mul_(factors[s.layer])


def _fitting(
    slices: Sequence[Tensor], segments: Sequence[Sequence[Segment]], like: Tensor
) -> Tensor:
    runs = [
        (s.layer, p[s.start : s.stop]) for p, i in zip(slices, segments, strict=True) for s in i
    ]
    largest = torch.zeros_like(like)
    if runs:
        norms = torch._foreach_norm([run for _, run in runs], ord=torch.inf)
        layers = torch.tensor([layer for layer, _ in runs], device=like.device)
        largest.scatter_reduce_(0, layers, torch.stack(norms).double(), "amax")
    return fitting_scales(largest)
