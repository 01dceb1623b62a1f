"""Which algorithm carries an Adasum, by size and by number of peers."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from offbeat.adasum_wire.cut import Cut
from offbeat.adasum_wire.gather import Gather
from offbeat.adasum_wire.gram import Gram
from offbeat.adasum_wire.narrow import Narrow
from offbeat.adasum_wire.rvhdd import Rvhdd
from offbeat.adasum_wire.wire import Wire

Method = Literal["auto", "gather", "gram", "rvhdd"]
METHODS: tuple[Method, ...] = ("auto", "gather", "gram", "rvhdd")
# Bytes of a slice until three rounds, in which fewer travel, are faster than one. Against Gloo's
# all-reduce at 250 Mbit/s with 2, 4 and 8 nodes: 64 KiB of updates 2.1, 0.8 and 1.0 x by gather,
# 3.2, 1.3 and 1.6 x by gram; 128 KiB 3.1, 2.4 and 1.9 against 2.2, 2.6 and 1.8; 256 KiB 1.6, 2.8
# and 3.6 against 1.0, 1.4 and 1.8.
SMALL = 2**16


def choose(
    method: Method, cut: Cut, slices: Sequence[Tensor], wire: Literal["bf16", "fp16"] | None
) -> Wire:
    """The algorithm ``method``, or with "auto" the faster one as measured.

    Raises ``ValueError`` where ``method`` cannot work in this world, alike on all ranks.
    """
    size = cut.peers.size
    if method == "rvhdd":
        if size & (size - 1):
            raise ValueError(
                f"method='rvhdd' halves vectors between 2, 4, 8, ... participants, found {size}; "
                "use method='gram', which works for any number"
            )
        return Rvhdd(cut, slices)
    narrow = None
    if wire is not None:
        spans = [cut.spans(piece) for piece in cut.whole()]
        narrow = Narrow(slices, spans, cut.layers, wire)
    messages = slices if narrow is None else narrow.messages
    # By what all ranks know alike: the sizes of slices, not what this rank holds of them.
    sent = sum(
        length * message.dtype.itemsize
        for length, message in zip(cut.lengths, messages, strict=True)
    )
    if method == "gather" or (method == "auto" and sent <= SMALL):
        return Gather(cut, slices, narrow)
    return Gram(cut, slices, narrow)
