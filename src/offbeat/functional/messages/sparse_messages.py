r"""Sparse messages with error feedback: the largest entries of every chunk, in a few bits each.

Source: Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo", Algorithm 1.
All tensors are flat; messages are bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from offbeat.functional.packing import Segment
from offbeat.functional.top_k import count_kept

CHUNK = 4096  # entries, so that 12 bits name one of them
Bits = Literal[2, 4, 8]
Chunk = tuple[int, int, int]  # start, stop, and the number of entries sent of it
SelectChunks = Callable[[Tensor, Sequence[Chunk]], Tensor]


def chunks_of(segments: Iterable[Segment], density: float) -> list[Chunk]:
    """Divide every segment into chunks of 4096 entries, of which a share of ``density`` is sent.

    >>> chunks_of([Segment(0, 0, 5000), Segment(1, 5000, 5010)], density=1 / 64)
    [(0, 4096, 64), (4096, 5000, 14), (5000, 5010, 1)]
    """
    spans = [
        (start, min(start + CHUNK, segment.stop))
        for segment in segments
        for start in range(segment.start, segment.stop, CHUNK)
    ]
    return [(start, stop, count_kept(stop - start, density)) for start, stop in spans]


@dataclass(frozen=True, eq=False)
class SparseFormat:
    """What a sparse message of a flat tensor holds, and where.

    Entries chunk by chunk. Of each: its value, in ``dtype`` or as a sign and ``bits - 1`` bits of
    magnitude, and 12 bits that name it in its chunk. Of each chunk, unless values are in
    ``dtype``: its smallest and its largest magnitude that is sent, in float32.
    """

    chunks: Sequence[Chunk]
    bits: Bits | None
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def count(self) -> int:
        """The number of entries in a message."""
        return sum(k for _, _, k in self.chunks)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of a message, a multiple of 8.

        >>> SparseFormat([(0, 4096, 64)], 2, torch.float32, torch.device("cpu")).nbytes
        120
        """
        return -(-sum(self._sizes) // 8) * 8

    def parts(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scales (chunks, 2), the values and the indices of a message."""
        scales, values, indices, _ = message.split([*self._sizes, self.nbytes - sum(self._sizes)])
        if self.bits is None:
            return scales, values.view(self.dtype), indices
        return scales.view(torch.float32).view(-1, 2), values, indices

    @cached_property
    def chunk_of(self) -> Tensor:
        """The chunk of each entry; int64 (count)."""
        counts = torch.tensor([k for _, _, k in self.chunks], device=self.device)
        numbers = torch.arange(len(self.chunks), device=self.device)
        return numbers.repeat_interleave(counts, output_size=self.count)

    @cached_property
    def start_of(self) -> Tensor:
        """Where the chunk of each entry begins in the flat tensor; int64 (count)."""
        starts = torch.tensor([start for start, _, _ in self.chunks], device=self.device)
        return starts[self.chunk_of]

    @cached_property
    def _sizes(self) -> tuple[int, int, int]:
        if self.bits is None:
            return 0, self.count * self.dtype.itemsize, -(-self.count // 2) * 3
        return 8 * len(self.chunks), -(-self.count * self.bits // 8), -(-self.count // 2) * 3


def fill_sparse(acc: Tensor, form: SparseFormat, message: Tensor, select: SelectChunks) -> None:
    r"""Fill a message with the largest entries of each chunk of ``acc``, which leave it.

    .. math:: m = Q(TopK(acc)), \qquad acc \leftarrow acc - m

    Q keeps the sign and one of :math:`2^{bits-1}` magnitudes: the middles of as many equal parts
    of the range of those sent in the chunk. What it takes away stays in ``acc``. An entry of zero
    is not sent where its chunk has others; the largest is sent twice in its place. If an entry is
    not finite, nor are the values in the message. ``select(acc, chunks)`` returns the indices.

    >>> acc = torch.tensor([1.0, -8.0, 2.0, -5.0])
    >>> form = SparseFormat([(0, 4, 3)], 2, acc.dtype, acc.device)
    >>> message = torch.zeros(form.nbytes, dtype=torch.uint8)
    >>> fill_sparse(acc, form, message, lambda acc, chunks: torch.tensor([3, 1, 2]))
    >>> add_sparse(message, form, torch.zeros(4)), acc
    (tensor([ 0.0000, -6.5000,  3.5000, -6.5000]), tensor([ 1.0000, -1.5000, -1.5000,  1.5000]))
    """
    indices = select(acc, form.chunks)
    values = acc[indices]
    scales, packed, places = form.parts(message)
    if form.bits is None:
        packed.copy_(values)
    else:
        nonzero = _instead_of_zeros(values.abs(), form)
        indices, values = indices[nonzero], values[nonzero]
        _quantize(values, form, scales, packed)
    places.copy_(_pack_indices(indices - form.start_of))
    # Not in place: an entry that is sent twice is subtracted once.
    acc.index_copy_(0, indices, acc[indices] - _values(message, form))


def add_sparse(message: Tensor, form: SparseFormat, total: Tensor) -> Tensor:
    """Add the entries of a message to ``total``, and return it."""
    _, _, places = form.parts(message)
    indices = form.start_of + _unpack_indices(places, form.count)
    return total.index_copy_(0, indices, total[indices] + _values(message, form))


def _instead_of_zeros(sizes: Tensor, form: SparseFormat) -> Tensor:
    """Return the place of each entry, but that of the largest of its chunk where it is zero."""
    places = torch.arange(form.count, device=sizes.device)
    largest = _extreme(sizes, form, "amax")[form.chunk_of]
    last = _extreme(torch.where(sizes == largest, places, 0), form, "amax")
    return torch.where((sizes == 0) & (largest > 0), last[form.chunk_of], places)


def _quantize(values: Tensor, form: SparseFormat, scales: Tensor, packed: Tensor) -> None:
    assert form.bits is not None, "there are levels"
    sizes, count = values.abs(), 2 ** (form.bits - 1)
    scales[:, 0] = _extreme(sizes, form, "amin")
    scales[:, 1] = _extreme(sizes, form, "amax")
    low, width = _ranges(scales, form)
    # 0 / 0 where all are equal. Scales are rounded: a magnitude may lie just outside of them.
    levels = ((sizes - low) / width).floor().nan_to_num(0).clamp(0, count - 1)
    codes = levels.to(torch.uint8) * 2 + (values < 0)
    each = 8 // form.bits
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % each)).view(-1, each)
    packed.zero_()
    for place, code in enumerate(codes.unbind(1)):
        packed.bitwise_or_(code << (place * form.bits))


def _values(message: Tensor, form: SparseFormat) -> Tensor:
    """Return the values of the entries of a message."""
    scales, packed, _ = form.parts(message)
    if form.bits is None:
        return packed
    shifts = torch.arange(0, 8, form.bits, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(1) >> shifts).view(-1)[: form.count] & (2**form.bits - 1)
    low, width = _ranges(scales, form)
    # One operation after the other: a fused one would round differently on another processor.
    sizes = ((codes >> 1).to(form.dtype) + 0.5).mul_(width).add_(low)
    return torch.where((codes & 1).bool(), -sizes, sizes)


def _ranges(scales: Tensor, form: SparseFormat) -> tuple[Tensor, Tensor]:
    """Return the least magnitude of each entry's chunk, and the width of a level."""
    assert form.bits is not None, "there are levels"
    low, high = scales.to(form.dtype).unbind(1)
    width = (high - low) / 2 ** (form.bits - 1)
    return low[form.chunk_of], width[form.chunk_of]


def _extreme(sizes: Tensor, form: SparseFormat, kind: Literal["amin", "amax"]) -> Tensor:
    """Return the smallest or the largest of each chunk; NaN where there is one."""
    found = sizes.new_zeros(len(form.chunks))
    return found.scatter_reduce_(0, form.chunk_of, sizes, kind, include_self=False)


def _pack_indices(indices: Tensor) -> Tensor:
    """Return two indices of 12 bits in every three bytes."""
    pairs = torch.nn.functional.pad(indices, (0, len(indices) % 2)).view(-1, 2)
    words = pairs[:, 0] | pairs[:, 1] << 12
    return torch.stack([words & 255, words >> 8 & 255, words >> 16], 1).to(torch.uint8).view(-1)


def _unpack_indices(places: Tensor, count: int) -> Tensor:
    low, middle, high = places.view(-1, 3).long().unbind(1)
    words = low | middle << 8 | high << 16
    return torch.stack([words & 4095, words >> 12], 1).view(-1)[:count]
