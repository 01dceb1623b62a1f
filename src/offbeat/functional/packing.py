"""Named tensors laid out in a few flat ones, so that a model travels as one message."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**16  # elements; a few blocks of them fit into a core's cache


@dataclass(frozen=True)
class Place:
    """Where one tensor lives: ``flat[section][offset : offset + prod(shape)]``.

    In the order in which a dense tensor's memory lies, transposed and channels-last ones too.
    """

    section: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A run of one tensor's elements: the ``layer``-th tensor's, at ``flat[start:stop]``."""

    layer: int
    start: int
    stop: int


class Segments(tuple[Segment, ...]):
    """Runs of tensors, also as a table for kernels, which is made once.

    >>> Segments([Segment(0, 0, 6), Segment(1, 6, 8)]).table.tolist()
    [[0, 0, 6], [1, 6, 8]]
    """

    @cached_property
    def table(self) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """Layer, start and stop of each; (runs, 3)."""
        rows = [(span.layer, span.start, span.stop) for span in self]
        return np.array(rows, np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class Layout:
    """Places of named tensors in flat sections, one section for each dtype.

    Every section's length is a multiple of ``slices`` and is followed by room for ``chunks``
    chunks of one slice each, so that ``chunks`` ranks can gather ``slices`` slices in place.
    Memory: the tensors' own bytes plus less than ``slices`` elements a section.

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
        """The layout of ``tensors``: the same on all ranks that hold the same names and shapes."""
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
        """No tensor is cut: part ``owners[name]`` of ``parts`` equal ones holds the tensor.

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

    def empty(self, device: torch.device | str, chunks: int = 0) -> list[Tensor]:
        """Zeroed flat sections with room for ``chunks`` slices (at least the layout's own)."""
        room = max(self.slices, chunks)
        return [
            torch.zeros(numel // self.slices * room, dtype=dtype, device=device)
            for dtype, numel in zip(self.dtypes, self.numels, strict=True)
        ]

    def views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """``flat`` seen as the named tensors; no copy."""
        return {
            name: flat[place.section][place.offset :].as_strided(place.shape, place.strides)
            for name, place in self.places.items()
        }

    def segments(self, section: int, start: int, stop: int) -> Segments:
        """Whose elements lie in ``flat[section][start:stop]``, counted from ``start``.

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
    """The parts of ``segments`` inside ``start`` to ``stop``, counted as before.

    >>> clip_segments([Segment(0, 0, 6), Segment(1, 6, 8)], 4, 7)
    (Segment(layer=0, start=4, stop=6), Segment(layer=1, start=6, stop=7))
    """
    cut = (Segment(s.layer, max(s.start, start), min(s.stop, stop)) for s in segments)
    return Segments(span for span in cut if span.start < span.stop)


def pack(into: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    """Copy ``tensors`` over ``into``, pair by pair: one pass over memory, casting on the way.

    Packs when ``into`` are the views of a :class:`Layout`, unpacks when ``tensors`` are.
    """
    pairs = list(zip(into, tensors, strict=True))
    if pairs:  # torch refuses an empty list
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def flat_view(tensor: Tensor) -> Tensor | None:
    """``tensor`` as its memory lies, flat and without a copy; None if it has gaps.

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
    """Aligned pieces of flat tensors of one length: what is done to a piece costs one pass.

    On a CPU the pieces stay in its cache between operations; on a GPU each is the whole.

    >>> [(len(a), len(b)) for a, b in cache_blocks(torch.zeros(70_000), torch.zeros(70_000))]
    [(65536, 65536), (4464, 4464)]
    """
    if flat[0].is_cuda or flat[0].numel() <= BLOCK:
        yield flat
    else:
        yield from zip(*(tensor.split(BLOCK) for tensor in flat), strict=True)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which to add: float32 for 16-bit types, else the type itself.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a copy of ``tensor``: the same without gaps."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def runs_within(sizes: Sequence[int], capacity: int, first: int) -> list[range]:
    """Consecutive runs of items, each of at most ``capacity`` bytes (or one larger item).

    The first run is capped at ``first`` bytes, so that a message leaves early in backward.

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
    """Which of ``parts`` holds each item, so that all hold about the same size.

    The largest first, each to the part that holds least: the fullest holds at most 4/3 of what the
    best arrangement would give it. Source: Graham 1969, "Bounds on Multiprocessing Timing
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
