"""The choice of the algorithm of an Adasum, by size and number of participants."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from offbeat.parameters.adasum.gather import Gather
from offbeat.parameters.adasum.gram import Gram
from offbeat.parameters.adasum.participants import DIRECT
from offbeat.parameters.adasum.reduction import Reduction
from offbeat.parameters.adasum.rounding import Rounding
from offbeat.parameters.adasum.rvhdd import Rvhdd
from offbeat.parameters.adasum.slice_layout import SliceLayout

Kind = Literal["gather", "gram", "rvhdd"]
Method = Literal["auto"] | Kind
ROUND = 2**19  # bytes that a rank may send to all others at once


def choose(method: Method, size: int, layers: int, sent: int, full: int) -> Kind:
    """Return the algorithm ``method`` or, with "auto", the one that is faster as measured.

    For a slice of ``sent`` bytes in messages and ``full`` in full precision. By what all ranks
    know. A large model goes by "gram", or by "rvhdd" if "gram" sends more than 2.05 slices because
    of its inner products, and more than "rvhdd".

    >>> [choose("auto", 32, layers, 10**7, 10**7) for layers in (1, 160)]
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
    model = 2 * (size - 1) * sent / size
    products = gram_bytes(size, layers)
    if products <= DIRECT or model + products <= 2.05 * sent:
        return "gram"
    halving = 2 * (size - 1) * full / size + halving_bytes(size, layers)
    return "gram" if model + products <= halving else "rvhdd"


def gram_bytes(size: int, layers: int) -> float:
    """Return what a rank sends for the inner products of all pairs of ``size`` vectors."""
    matrices = 8 * size**2 * layers
    direct = (size - 1) * matrices
    return direct if direct <= DIRECT else 2 * (size - 1) * matrices / size


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
    kind = choose(method, layout.participants.size, layout.layers, sent, full)
    if kind == "rvhdd":
        return Rvhdd(layout, slices)
    rounding = None
    if wire is not None:
        segments = [layout.segments(piece) for piece in layout.whole()]
        rounding = Rounding(slices, segments, layout.layers, wire)
    return (Gather if kind == "gather" else Gram)(layout, slices, rounding)
