"""Which algorithm carries an Adasum, by size and by number of peers."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from offbeat.parameters.adasum.gather import Gather
from offbeat.parameters.adasum.gram import Gram
from offbeat.parameters.adasum.reduction import Reduction
from offbeat.parameters.adasum.rounding import Rounding
from offbeat.parameters.adasum.rvhdd import Rvhdd
from offbeat.parameters.adasum.slices import SliceLayout

Method = Literal["auto", "gather", "gram", "rvhdd"]
METHODS: tuple[Method, ...] = ("auto", "gather", "gram", "rvhdd")


def is_small(sent: int, size: int) -> bool:
    """Whether ``sent`` bytes of a slice go faster to all of ``size`` ranks in one round.

    In three fewer of them travel, except between two. As measured, see docs/benchmarks.md.
    """
    # Gather and gram against Gloo's all-reduce: 64 KiB between 4 and 8 nodes at 250 Mbit/s 0.9
    # and 1.0 to 1.1 x, 256 KiB 2.9 and 4.2 against 1.1 x. Between 2 nodes 256 KiB 0.9, 1.5 and
    # 1.7 against 1.0, 1.9 and 3.4 x at 250 Mbit/s, 1 Gbit/s and without a limit; 1 MiB 1.0, 1.3
    # and 2.1 against 1.0, 1.2 and 2.9 x.
    return sent <= (2**19 if size == 2 else 2**16)


def build_reduction(
    method: Method, cut: SliceLayout, slices: Sequence[Tensor], wire: Literal["bf16", "fp16"] | None
) -> Reduction:
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
        narrow = Rounding(slices, spans, cut.layers, wire)
    messages = slices if narrow is None else narrow.messages
    # By what all ranks know alike: the sizes of slices, not what this rank holds of them.
    sent = sum(
        length * message.dtype.itemsize
        for length, message in zip(cut.lengths, messages, strict=True)
    )
    if method == "gather" or (method == "auto" and is_small(sent, size)):
        return Gather(cut, slices, narrow)
    return Gram(cut, slices, narrow)
