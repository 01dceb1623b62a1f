"""What a rank sends of the largest entries: values and indices, packed into words of 4 bytes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from offbeat.functional import accumulation_dtype, count_kept, is_cheaper_dense
from offbeat.functional.messages.sixteen_bits import DTYPES, Sixteen, round_to_16_bits


def value_dtype(dtype: torch.dtype, wire: Sixteen | None) -> torch.dtype:
    """Return the dtype in which values of gradients of ``dtype`` are sent.

    >>> value_dtype(torch.bfloat16, None), value_dtype(torch.float32, "fp16")
    (torch.float32, torch.float16)
    """
    return accumulation_dtype(dtype) if wire is None else DTYPES[wire]


def kept_entries(
    numel: int, density: float, dtype: torch.dtype, size: int, wire: Sixteen | None = None
) -> int:
    """Return how many entries ``size`` ranks send; 0 where sending all costs no more.

    >>> kept_entries(1000, 0.01, torch.float32, 4), kept_entries(1000, 0.5, torch.float32, 4)
    (10, 0)
    """
    k, value = count_kept(numel, density), value_dtype(dtype, wire).itemsize
    return 0 if is_cheaper_dense(numel, k, value, size, dtype.itemsize) else k


@dataclass(frozen=True)
class PayloadFormat:
    """What a payload holds, in this order, and the words of each part.

    Values, their scale with "fp16" (float32), int32 indices, one flag for each of ``layers`` and
    two more, and a word to make their number even: payloads of float64 begin at multiples of 8.

    >>> PayloadFormat(100, 1, torch.float32, None).nbytes
    816
    >>> PayloadFormat(100, 1, torch.float32, "bf16").nbytes
    616
    """

    entries: int
    layers: int
    dtype: torch.dtype  # of the gradients
    wire: Sixteen | None

    @cached_property
    def words(self) -> tuple[int, int, int, int, int]:
        """The words of values, scale, indices, flags and padding."""
        values = -(-self.entries * value_dtype(self.dtype, self.wire).itemsize // 4)
        parts = values, int(self.wire == "fp16"), self.entries, self.layers + 2
        return *parts, sum(parts) % 2

    @property
    def nbytes(self) -> int:
        """The bytes of a payload."""
        return 4 * sum(self.words)

    def allocate(self, ranks: int, device: torch.device) -> "tuple[Tensor, list[Payload]]":
        """Return one tensor for the payloads of all ranks, zero, and the payload of each."""
        length = sum(self.words)
        whole = torch.zeros(ranks * length, dtype=torch.int32, device=device)
        return whole, [self._part(words) for words in whole.split(length)]

    def _part(self, words: Tensor) -> "Payload":
        values, scale, indices, flags, _ = words.split(self.words)
        narrow = values.view(value_dtype(self.dtype, self.wire))[: self.entries]
        return Payload(words, narrow, scale.view(torch.float32), indices, flags, self.wire)


@dataclass(eq=False)
class Payload:
    """Part of one rank in a message."""

    words: Tensor  # what follows, as int32
    values: Tensor
    scale: Tensor  # of "fp16", else without entries
    indices: Tensor
    flags: Tensor
    wire: Sixteen | None

    def put(self, values: Tensor) -> Tensor:
        """Write values, and return what the other ranks will read."""
        if self.wire is None:
            self.values.copy_(values)
            return values
        narrow, scale = round_to_16_bits(values, self.wire)
        self.values.copy_(narrow)
        self.scale.copy_(scale)
        return narrow.to(values.dtype).div_(scale)

    def read(self, like: Tensor) -> Tensor:
        """Return the values in the dtype and on the device of ``like``."""
        values = self.values.to(like.device, like.dtype)
        return values / self.scale.to(like.device) if self.scale.numel() else values
