"""Layouts of named tensors in a few flat ones, so that a model is one message."""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from offbeat.platform.device import is_on_host

BLOCK = 2**16  # elements; a few blocks of them fit into a core's cache


@dataclass(frozen=True)
class Place:
    """The place of one tensor: ``flat[section][offset : offset + prod(shape)]``.

    Elements are in memory order, also those of transposed and channels-last tensors.
    """

    section: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one tensor: of the ``layer``-th one, at ``flat[start:stop]``."""

    layer: int
    start: int
    stop: int


class Segments(tuple[Segment, ...]):
    """A tuple of segments, and the same as an array for kernels, which is built once.

    >>> Segments([Segment(0, 0, 6), Segment(1, 6, 8)]).table.tolist()
    [[0, 0, 6], [1, 6, 8]]
    """

    @cached_property
    def table(self) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """Layer, start and stop of each segment; int64 (segments, 3)."""
        rows = [(span.layer, span.start, span.stop) for span in self]
        return np.array(rows, np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class Layout:
    """Arranges named tensors in flat sections, one section for each dtype.

    The length of every section is a multiple of ``slices``. Memory for ``chunks`` slices can be
    allocated, so that ``chunks`` ranks can gather ``slices`` slices in place.
    Memory: the tensors' own bytes plus less than ``slices`` elements per section.

    >>> layout = Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, slices=3)
    >>> layout.places["b"], layout.numels
    (Place(section=0, offset=6, shape=(2,), strides=(1,)), (9,))
    >>> flat = layout.empty("cpu")
    >>> pack(layout.views(flat).values(), [torch.ones(2, 3), torch.ones(2)])
    >>> flat[0][:8].sum()
    tensor(8.)
    """

    places: Mapping[str, Place]
    dtypes: tuple[torch.dtype, ...]
    numels: tuple[int, ...]
    slices: int = 1

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], slices: int = 1) -> "Layout":
        """Return the layout of ``tensors``, equal on all ranks with equal names and shapes."""
        dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
        ends = [0] * len(dtypes)
        places = {}
        for name, tensor in tensors.items():
            section = dtypes.index(tensor.dtype)
            places[name] = Place(section, ends[section], tuple(tensor.shape), _dense(tensor))
            ends[section] += tensor.numel()
        return cls(places, dtypes, tuple(-(-end // slices) * slices for end in ends), slices)

    @classmethod
    def whole(
        cls, tensors: Mapping[str, Tensor], owners: Mapping[str, int], parts: int, multiple: int
    ) -> "Layout":
        """Return a layout in which part ``owners[name]`` of ``parts`` holds a tensor whole.

        Every part is as long as the fullest, and a multiple of ``multiple`` slices.

        >>> tensors = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
        >>> layout = Layout.whole(tensors, {"w": 0, "b": 1}, parts=2, multiple=1)
        >>> layout.places["b"].offset, layout.numels
        (6, (12,))
        """
        shares = [
            cls.of({n: t for n, t in tensors.items() if owners[n] == part}, multiple)
            for part in range(parts)
        ]
        dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
        numels = tuple(max(share._numel(dtype) for share in shares) for dtype in dtypes)
        places = {}
        for name, tensor in tensors.items():
            section, place = dtypes.index(tensor.dtype), shares[owners[name]].places[name]
            offset = owners[name] * numels[section] + place.offset
            places[name] = replace(place, section=section, offset=offset)
        return cls(places, dtypes, tuple(n * parts for n in numels), parts * multiple)

    def part(self, index: int, parts: int, names: Collection[str]) -> "Layout":
        """Return the layout of one part alone of :meth:`whole`, which holds ``names``.

        >>> tensors = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
        >>> layout = Layout.whole(tensors, {"w": 0, "b": 1}, parts=2, multiple=2)
        >>> layout.part(1, 2, {"b"}).places["b"].offset, layout.part(1, 2, {"b"}).numels
        (0, (6,))
        """
        numels = tuple(numel // parts for numel in self.numels)
        places = {
            name: replace(place, offset=place.offset - index * numels[place.section])
            for name, place in self.places.items()
            if name in names
        }
        return Layout(places, self.dtypes, numels, self.slices // parts)

    def empty(self, device: torch.device | str, chunks: int = 0) -> list[Tensor]:
        """Return zeroed sections (numel,), with memory for ``chunks`` slices or all of them."""
        room = max(self.slices, chunks)
        return [
            torch.zeros(numel // self.slices * room, dtype=dtype, device=device)
            for dtype, numel in zip(self.dtypes, self.numels, strict=True)
        ]

    def wide(self, device: torch.device | str, chunks: int = 0) -> list[Tensor]:
        """Return what :meth:`empty` does, in the dtype of sums."""
        return [part.to(accumulation_dtype(part.dtype)) for part in self.empty(device, chunks)]

    @property
    def is_rounded(self) -> bool:
        """Whether some tensors have fewer bits than sums of them."""
        return any(dtype != accumulation_dtype(dtype) for dtype in self.dtypes)

    def views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views of ``flat`` as the named tensors."""
        return {
            name: flat[place.section][place.offset :].as_strided(place.shape, place.strides)
            for name, place in self.places.items()
        }

    def segments(self, section: int, start: int, stop: int) -> Segments:
        """Return the segments in ``flat[section][start:stop]``, relative to ``start``.

        >>> Layout.of({"w": torch.zeros(6), "b": torch.zeros(2)}).segments(0, 4, 7)
        (Segment(layer=0, start=0, stop=2), Segment(layer=1, start=2, stop=3))
        """
        found = []
        for layer, place in enumerate(self.places.values()):
            if place.section == section:
                first = max(place.offset, start) - start
                last = min(place.offset + prod(place.shape), stop) - start
                if first < last:
                    found.append(Segment(layer, first, last))
        return Segments(found)

    def _numel(self, dtype: torch.dtype) -> int:
        return self.numels[self.dtypes.index(dtype)] if dtype in self.dtypes else 0


def clip_segments(segments: Iterable[Segment], start: int, stop: int) -> Segments:
    """Return the parts of ``segments`` between ``start`` and ``stop``.

    >>> clip_segments([Segment(0, 0, 6), Segment(1, 6, 8)], 4, 7)
    (Segment(layer=0, start=4, stop=6), Segment(layer=1, start=6, stop=7))
    """
    cut = (Segment(s.layer, max(s.start, start), min(s.stop, stop)) for s in segments)
    return Segments(span for span in cut if span.start < span.stop)


@torch.no_grad()
def pack(into: Iterable[Tensor], tensors: Iterable[Tensor], *, non_blocking: bool = False) -> None:
    """Copy ``tensors`` over ``into``, pair by pair: one pass over memory, casting on the way.

    Packs when ``into`` are the views of a :class:`Layout`, unpacks when ``tensors`` are. Autograd
    does not record the copies. ``non_blocking`` as in :meth:`torch.Tensor.copy_`.
    """
    pairs = list(zip(into, tensors, strict=True))
    if pairs:  # torch refuses an empty list
        sources = [source for _, source in pairs]
        torch._foreach_copy_([to for to, _ in pairs], sources, non_blocking=non_blocking)


def flat_view(tensor: Tensor) -> Tensor | None:
    """Return a flat view of ``tensor`` in memory order; None if its memory has gaps.

    >>> flat_view(torch.tensor([[1, 2], [3, 4]]).T)
    tensor([1, 2, 3, 4])
    >>> flat_view(torch.zeros(4, 4)[:, 0]) is None
    True
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.stride() != _dense(tensor):
        return None
    return tensor.as_strided((tensor.numel(),), (1,))


def cache_blocks(*flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield aligned blocks of flat tensors of one length; operations on a block cost one pass.

    On a CPU a block stays in cache between operations; on a GPU a block is the whole tensor.

    >>> [(len(a), len(b)) for a, b in cache_blocks(torch.zeros(70_000), torch.zeros(70_000))]
    [(65536, 65536), (4464, 4464)]
    """
    if not is_on_host(flat[0]) or flat[0].numel() <= BLOCK:
        yield flat
    else:
        yield from zip(*(tensor.split(BLOCK) for tensor in flat), strict=True)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32 for 16-bit types, otherwise the type itself.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of ``tensor``, which has no gaps."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def runs_within(sizes: Sequence[int], capacity: int, first: int) -> list[range]:
    """Divide items into consecutive runs of at most ``capacity`` bytes (or one larger item).

    The first run is limited to ``first`` bytes, so that a message is sent early in backward.

    >>> runs_within([1, 1, 3, 2, 2, 9], capacity=4, first=2)
    [range(0, 2), range(2, 3), range(3, 5), range(5, 6)]
    """
    runs: list[range] = []
    start, held = 0, 0
    for index, size in enumerate(sizes):
        if index > start and held + size > (capacity if runs else first):
            runs.append(range(start, index))
            start, held = index, 0
        held += size
    return [*runs, range(start, len(sizes))] if sizes else []


def balance(sizes: Sequence[int], parts: int) -> list[int]:
    """Assign each item to one of ``parts``, so that their sizes are about equal.

    Largest first, each to the smallest part: the largest part is at most 4/3 of that in the best
    assignment. Source: Graham 1969, "Bounds on Multiprocessing Timing
    Anomalies".

    >>> balance([1, 6, 2, 3, 2], parts=2)
    [0, 0, 1, 1, 1]
    """
    held = [(0, 0, part) for part in range(parts)]  # size, items, number
    homes = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size, items, part = heapq.heappop(held)
        homes[index] = part
        heapq.heappush(held, (size + sizes[index], items + 1, part))
    return homes
