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
# Bytes that a rank gathers until three rounds of fewer bytes are faster. Against Gloo's all-reduce,
# at 250 Mbit/s: 64 KiB of updates 1.1 x by gather and 2.1 x by gram with 4 nodes, 1.1 and 2.3 with
# 8; 256 KiB 2.3 and 1.6, 2.2 and 1.5.
SMALL = 2**19


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
    gathered = size * sum(
        length * message.dtype.itemsize
        for length, message in zip(cut.lengths, messages, strict=True)
    )
    if method == "gather" or (method == "auto" and gathered <= SMALL):
        return Gather(cut, slices, narrow)
    return Gram(cut, slices, narrow)
