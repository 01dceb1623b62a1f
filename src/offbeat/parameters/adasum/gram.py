"""Each rank combines its own share, with coefficients that follow from inner products."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from offbeat.comm.handle import Handle
from offbeat.comm.messages import MessageRounds, Round
from offbeat.parameters.adasum.operands import Operands
from offbeat.parameters.adasum.reduction import Reduction, Statistics
from offbeat.parameters.adasum.rounding import ROOM, Rounding, fitting_scales, widen
from offbeat.parameters.adasum.slices import Piece, SliceLayout


@final
class Gram(Reduction):
    """All-to-all the shares, sum the Gram matrices, combine the shares, all-gather.

    Sends 2 (P-1)/P of the slice's bytes, as an all-reduce does, and one matrix of P x P float64
    for each layer; any number of peers. Extra memory: one slice. Passes over memory: two.

    With 16 bits on the wire vectors are rounded when they leave and combinations when they are
    handed out; the owner of a share uses the rounded one too, so that all ranks stay equal.
    """

    def __init__(
        self, cut: SliceLayout, slices: Sequence[Tensor], narrow: Rounding | None = None
    ) -> None:
        """Allocate the rows and prepare the messages."""
        self._peers, self._cut = cut.peers, cut
        self._slices, self._narrow = slices, narrow
        self._messages = slices if narrow is None else narrow.messages
        self._share = cut.share() if cut.peers.group is not None else []
        self._runs = cut.runs(self._share)
        self._mine = [cut.placed(section, cut.peers.rank) for section in self._share]
        self._outs = [share.of(slices) for share in self._mine]
        self._rows = Operands(cut, self._mine, self._runs, self._messages, split=True)
        self._result: Rounding | None = None
        if narrow is not None and self._mine:
            self._result = Rounding(self._outs, self._rows.spans, cut.layers, narrow.wire)
        self._prepare()

    def _prepare(self) -> None:
        group, size = self._peers.group, self._peers.size
        self._there = self._back = None
        if group is None:
            return
        # One peer at a time: nobody receives from two. 4 MiB between 4 nodes at 250 Mbit/s take
        # 104 ms, and 112 if all send to all at once; the links' floor is 101. What the last peer
        # sends completes one run after the other: the next ones travel while inner products of
        # these are summed. And what the first gets leaves as it is combined.
        last = [self._swap(size - 1, [run]) for run in self._runs]
        self._there = MessageRounds(
            [self._swap(h, self._share) for h in range(1, size - 1)] + last, group
        )
        # Whole where all of it is rounded together first.
        runs = [[run] for run in self._runs] if self._narrow is None else [self._share]
        first = [self._hand_out(1, run) for run in runs]
        self._back = MessageRounds(
            first + [self._hand_out(h, self._share) for h in range(2, size)], group
        )

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """Vectors when they leave, and this rank's share of the combination."""
        if self._narrow is None or self._result is None:
            return []
        return [(self._cut.whole(), self._narrow), (self._mine, self._result)]

    def compare(self) -> Statistics:
        """Give every peer its share, and take this rank's from all of them."""
        self._rows.begin()
        narrow = self._narrow
        if self._there is not None:
            if self._there.expect():
                self._rows.expect()
            if narrow is not None:
                narrow.cast(self._slices)
            self._rows.keep([share.of(self._messages) for share in self._mine])
            for _ in range(1, self._peers.size - 1):
                self._peers.wait(self._there.start())
            launched = [self._there.start() for _ in self._runs]
            self._rows.expect()  # at the latest, and not sooner: see Rounds
            for index, handle in enumerate(launched):
                self._peers.wait(handle)
                self._rows.add(index)
        return self._rows.judge(narrow.scales if narrow is not None and narrow.scaled else None)

    def combine(self) -> None:
        """Combine this rank's share, and hand it out."""
        if self._narrow is not None and self._mine:
            self._narrow.keep_errors(self._slices)
        redone = self._rows.redo(self._outs)
        if self._back is None:
            return
        self._back.expect()  # not before: to combine a layer again takes messages of its own
        if self._narrow is not None and self._result is not None:
            self._combine_narrow(self._back, self._narrow, self._result, redone)
            return
        first = []
        for index in range(len(self._runs)):
            self._rows.combine(index, self._outs, redone)
            first.append(self._back.start())
        self._finish(self._back, first)

    def _combine_narrow(
        self, back: MessageRounds, narrow: Rounding, result: Rounding, redone: set[int]
    ) -> None:
        for index in range(len(self._runs)):
            self._rows.combine(index, self._outs, redone)
        # Known to all peers alike, so that no scale has to travel.
        scales = fitting_scales(self._rows.bounds() * 2.0**ROOM) if narrow.scaled else None
        result.cast(self._outs, scales)
        for share, message in zip(self._mine, result.messages, strict=True):
            share.of(narrow.messages).copy_(message)
        first = back.start()
        result.keep_errors(self._outs)
        self._finish(back, [first])
        spans = [self._cut.spans(piece) for piece in self._cut.whole()]
        widen(narrow.messages, spans, None if scales is None else 1 / scales, self._slices)

    def _finish(self, back: MessageRounds, first: Sequence[Handle]) -> None:
        """Hand this rank's share to all others too, once the first has it."""
        for handle in first:
            self._peers.wait(handle)
        for _ in range(2, self._peers.size):
            self._peers.wait(back.start())

    def _swap(self, hop: int, runs: Sequence[Piece]) -> Round:
        """Send runs of the share of the peer ``hop`` places ahead, receive from the one behind."""
        to, source = self._neighbours(hop)
        sends = [(to, self._cut.placed(run, to).of(self._messages)) for run in runs]
        rows = [self._rows.rows[run.section][source, run.start : run.stop] for run in runs]
        return sends, [(source, row) for row in rows]

    def _hand_out(self, hop: int, runs: Sequence[Piece]) -> Round:
        """Send runs of this rank's share ``hop`` places ahead, receive from the one behind."""
        # Not by an all-gather: Gloo's fills a buffer of its own, as large as the result, and
        # copies it; and it sends a large message of a pair one way at a time, mostly.
        to, source = self._neighbours(hop)
        sends = [(to, self._cut.placed(run, self._peers.rank).of(self._messages)) for run in runs]
        received = [self._cut.placed(run, source).of(self._messages) for run in runs]
        return sends, [(source, part) for part in received]

    def _neighbours(self, hop: int) -> tuple[int, int]:
        rank, size = self._peers.rank, self._peers.size
        return (rank + hop) % size, (rank - hop) % size
