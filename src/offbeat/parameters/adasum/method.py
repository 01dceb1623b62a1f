"""The choice of the algorithm of an Adasum, by size and number of participants."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from offbeat.parameters.adasum.gather import Gather
from offbeat.parameters.adasum.gram import Gram
from offbeat.parameters.adasum.reduction import Reduction
from offbeat.parameters.adasum.rounding import Rounding
from offbeat.parameters.adasum.rvhdd import Rvhdd
from offbeat.parameters.adasum.slice_layout import SliceLayout

Method = Literal["auto", "gather", "gram", "rvhdd"]


def is_small(sent: int, size: int) -> bool:
    """Return whether a slice of ``sent`` bytes is reduced faster by one round to all ranks.

    Three rounds send fewer bytes, except between two ranks. From measurements, as multiples of
    Gloo's all-reduce (bench/adasum).
    """
    # Gather against gram: 64 KiB between 4 and 8 nodes at 250 Mbit/s 0.9 against 1.0 to 1.1 x,
    # 256 KiB 2.9 and 4.2 against 1.1 x. Between 2 nodes at 250 Mbit/s, 1 Gbit/s and without a
    # limit: 256 KiB 0.9, 1.5 and 1.7 against 1.0, 1.9 and 3.4 x; 1 MiB 1.0, 1.3 and 2.1 against
    # 1.0, 1.2 and 2.9 x.
    return sent <= (2**19 if size == 2 else 2**16)


def build_reduction(
    method: Method,
    layout: SliceLayout,
    slices: Sequence[Tensor],
    wire: Literal["bf16", "fp16"] | None,
) -> Reduction:
    """Prepare the algorithm ``method`` or, with "auto", the faster one as measured.

    Raises ``ValueError`` where ``method`` cannot work in this world, alike on all ranks.
    """
    size = layout.participants.size
    if method == "rvhdd":
        if size & (size - 1):
            raise ValueError(
                f"method='rvhdd' halves vectors between 2, 4, 8, ... participants, found {size}; "
                "use method='gram', which works for any number"
            )
        return Rvhdd(layout, slices)
    rounding = None
    if wire is not None:
        segments = [layout.segments(piece) for piece in layout.whole()]
        rounding = Rounding(slices, segments, layout.layers, wire)
    messages = slices if rounding is None else rounding.messages
    # By sizes that all ranks know, not by what this rank holds of the slice.
    sent = sum(
        length * message.dtype.itemsize
        for length, message in zip(layout.lengths, messages, strict=True)
    )
    # A single participant has nothing to exchange: the shares of gram would be sent to itself.
    if method == "gather" or size == 1 or (method == "auto" and is_small(sent, size)):
        return Gather(layout, slices, rounding)
    return Gram(layout, slices, rounding)
