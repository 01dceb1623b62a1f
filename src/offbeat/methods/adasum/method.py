"""The choice of the algorithm of an Adasum, by size and number of participants."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from offbeat.methods.adasum.gram import Gram
from offbeat.methods.adasum.participants import SMALL
from offbeat.methods.adasum.reduction import Reduction
from offbeat.methods.adasum.rounding import Rounding
from offbeat.methods.adasum.rvhdd import EARLY, Rvhdd
from offbeat.methods.adasum.slice_layout import SliceLayout

Kind = Literal["gather", "gram", "rvhdd"]
Method = Literal["auto"] | Kind
ROUND = 2**19  # bytes that a rank may send to all others at once


def choose(
    method: Method, size: int, layers: int, sent: int, full: int, is_wide: bool = True
) -> Kind:
    """Return the algorithm ``method`` or, with "auto", the one that is faster as measured.

    For a slice of ``sent`` bytes in messages and ``full`` in full precision. By what all ranks
    know; ``is_wide``: no value has 16 bits, on the wire or in memory. Fewer than 16 participants
    whose inner products are small go by "gram"; other powers of two, and up to 2 MiB any number, by
    "rvhdd", which cannot send 16 bits instead of 32, and rounds to those of 16-bit parameters at
    every level. All others go by "gram". From 8 participants on, where "gram" would send more than
    2.05 slices because of its inner products, it must send less than "rvhdd".

    >>> [choose("auto", size, 160, 10**7, 10**7) for size in (4, 16)]
    ['gram', 'rvhdd']
    >>> [choose("auto", 9, 160, sent, sent) for sent in (10**6, 10**7)]
    ['rvhdd', 'gram']
    >>> [choose("auto", size, 160, 10**7, 2 * 10**7, is_wide=False) for size in (16, 512)]
    ['gram', 'rvhdd']
    """
    if size == 1:  # nothing to exchange: the shares of gram would be sent to itself
        return "gather"
    if method != "auto":
        return method
    # Gather against gram, as multiples of Gloo's all-reduce (bench/adasum): 64 KiB between 4 and 8
    # nodes at 250 Mbit/s 0.9 against 1.0 to 1.1 x, 256 KiB 2.9 and 4.2 against 1.1 x. Between 2
    # nodes at 250 Mbit/s, 1 Gbit/s and without a limit: 256 KiB 0.9, 1.5 and 1.7 against 1.0, 1.9
    # and 3.4 x; 1 MiB 1.0, 1.3 and 2.1 against 1.0, 1.2 and 2.9 x.
    if sent <= (ROUND if size == 2 else 2**16) and (size - 1) * sent <= ROUND:
        return "gather"
    # Gram against rvhdd, at 1 Gbit/s and 250 Mbit/s, up to 16 layers: 1 MiB between 8 nodes 1.3
    # against 1.5 and 1.1 against 1.1 x, between 9 1.3 against 1.7 and 1.1 against 1.4 x. With
    # products that go round a ring (160 layers): 1 MiB between 6 nodes 2.0 against 1.7 and 1.4
    # against 1.2 x; 16 MiB between 8 nodes 1.4 against 1.2 and 1.10 against 1.04 x, but between 6,
    # where one rank sends its whole slice in one round, 1.2 against 1.4 and 1.1 against 1.3 x.
    # Between 16 nodes 4 MiB take 1.75 against 1.70 and 1.8 against 1.2 x also with 4 layers.
    is_power, products = size & (size - 1) == 0, gram_bytes(size, layers)
    is_small = _is_small(size, layers)
    if is_wide and not (is_small and size < 16) and (is_power or sent <= EARLY):
        return "rvhdd"
    model = 2 * (size - 1) * sent / size
    if (is_small and size < 8) or model + products <= 2.05 * sent:
        return "gram"
    halving = 2 * (size - 1) * full / size + halving_bytes(size, layers)
    return "gram" if model + products <= halving else "rvhdd"


def gram_bytes(size: int, layers: int) -> float:
    """Return what a rank sends at most for the inner products of all pairs of ``size`` vectors."""
    matrices = 8 * size**2 * layers
    return (size - 1) * matrices * (1 if _is_small(size, layers) else 2 / size)


def _is_small(size: int, layers: int) -> bool:
    """Return whether the first participant adds the inner products of all pairs."""
    return (size - 1) * 8 * size**2 * layers <= SMALL


def halving_bytes(size: int, layers: int) -> int:
    """Return what a rank sends at most for the products of pairs, four numbers of each layer.

    >>> halving_bytes(8, layers=1)  # to 1, 2 and 3 others
    192
    """
    levels = (size - 1).bit_length()
    return 32 * layers * levels * (levels + 1) // 2


def build_reduction(
    method: Method,
    layout: SliceLayout,
    slices: Sequence[Tensor],
    wire: Literal["bf16", "fp16"] | None,
) -> Reduction:
    """Prepare the algorithm ``method`` or, with "auto", the faster one as measured."""
    # By sizes that all ranks know, not by what this rank holds of the slice.
    sizes = [(n, part.dtype.itemsize) for n, part in zip(layout.lengths, slices, strict=True)]
    full = sum(numel * itemsize for numel, itemsize in sizes)
    sent = full if wire is None else sum(numel * min(itemsize, 2) for numel, itemsize in sizes)
    is_wide = wire is None and all(itemsize >= 4 for _, itemsize in sizes)
    kind = choose(method, layout.participants.size, layout.layers, sent, full, is_wide)
    if kind == "rvhdd":
        return Rvhdd(layout, slices)
    rounding = None
    if wire is not None:
        segments = [layout.segments(piece) for piece in layout.whole()]
        rounding = Rounding(slices, segments, layout.layers, wire)
    return Gram(layout, slices, rounding, split=kind == "gram")
