"""Adasum by shares: each rank combines its own, with coefficients from inner products."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from offbeat.functional.messages.sixteen_bits import ROOM, fitting_scales
from offbeat.methods.adasum.operands import Operands
from offbeat.methods.adasum.reduction import Reduction, Statistics
from offbeat.methods.adasum.rounding import Rounding, widen
from offbeat.methods.adasum.slice_layout import Piece, SliceLayout
from offbeat.transport.handle import Handle
from offbeat.transport.messages import MessageRounds, Round


@final
class Gram(Reduction):
    """All-to-all the shares, sum the Gram matrices, combine the shares, all-gather.

    Sends 2 (P-1)/P of the slice's bytes, as an all-reduce does, and one matrix of P x P float64
    for each layer; any number of peers. Extra memory: one slice. Passes over memory: two.

    With 16-bit messages vectors are rounded before they are sent, and so are combinations; the
    owner of a share uses the rounded combination too, so that all ranks stay equal.
    """

    def __init__(
        self, layout: SliceLayout, slices: Sequence[Tensor], rounding: Rounding | None = None
    ) -> None:
        """Allocate the rows and prepare the messages."""
        self._participants, self._layout = layout.participants, layout
        self._slices, self._rounding = slices, rounding
        self._messages = slices if rounding is None else rounding.messages
        self._share = layout.share() if layout.participants.group is not None else []
        self._runs = layout.runs(self._share)
        self._mine = [layout.placed(section, layout.participants.rank) for section in self._share]
        self._outs = [share.of(slices) for share in self._mine]
        self._operands = Operands(layout, self._mine, self._runs, self._messages, split=True)
        self._result: Rounding | None = None
        if rounding is not None and self._mine:
            self._result = Rounding(
                self._outs, self._operands.segments, layout.layers, rounding.wire
            )
        self._prepare()

    def _prepare(self) -> None:
        group, size = self._participants.group, self._participants.size
        self._there = self._back = None
        if group is None:
            return
        # One partner at a time, so that no rank receives from two: 4 MiB between 4 nodes at
        # 250 Mbit/s take 104 ms, and 112 if all send to all at once; the links' floor is 101. The
        # share from the last partner completes one run after the other: the next runs are in
        # flight while the inner products of these are summed. On the way back the first partner
        # gets each run as soon as it is combined.
        last = [self._swap(size - 1, [run]) for run in self._runs]
        self._there = MessageRounds(
            [self._swap(h, self._share) for h in range(1, size - 1)] + last, group
        )
        # As a whole where all of it is rounded together first.
        runs = [[run] for run in self._runs] if self._rounding is None else [self._share]
        first = [self._send_back(1, run) for run in runs]
        self._back = MessageRounds(
            first + [self._send_back(h, self._share) for h in range(2, size)], group
        )

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """Vectors before they are sent, and this rank's share of the combination."""
        if self._rounding is None or self._result is None:
            return []
        return [(self._layout.whole(), self._rounding), (self._mine, self._result)]

    @property
    def memory(self) -> list[Tensor]:
        """The buffers of messages and of other participants' vectors."""
        result = self._result.messages if self._result is not None else []
        return [*self._messages, *self._operands.rows, *result]

    def compare(self) -> Statistics:
        """Send every participant its share, and receive this rank's share from all of them."""
        self._operands.begin()
        rounding = self._rounding
        if self._there is not None:
            if self._there.expect():
                self._operands.expect()
            if rounding is not None:
                rounding.cast(self._slices)
            for _ in range(1, self._participants.size - 1):
                self._participants.wait(self._there.start())
            launched = [self._there.start() for _ in self._runs]
            self._operands.expect()  # at the latest, and not sooner: see MessageRounds
            # While messages travel.
            self._operands.keep([share.of(self._messages) for share in self._mine])
            for index, handle in enumerate(launched):
                self._participants.wait(handle)
                self._operands.add(index)
        return self._operands.analyze(
            rounding.scales if rounding is not None and rounding.scaled else None
        )

    def combine(self) -> None:
        """Combine this rank's share, and send it to all others."""
        if self._rounding is not None and self._mine:
            self._rounding.keep_errors(self._slices)
        redone = self._operands.redo(self._outs)
        if self._back is None:
            return
        self._back.expect()  # not before redo(), which exchanges messages of its own
        if self._rounding is not None and self._result is not None:
            self._combine_rounded(self._back, self._rounding, self._result, redone)
            return
        first = []
        for index in range(len(self._runs)):
            self._operands.combine(index, self._outs, redone)
            first.append(self._back.start())
        self._finish(self._back, first)

    def _combine_rounded(
        self, back: MessageRounds, rounding: Rounding, result: Rounding, redone: set[int]
    ) -> None:
        for index in range(len(self._runs)):
            self._operands.combine(index, self._outs, redone)
        # Known to all ranks alike, so that no scale has to be sent.
        scales = fitting_scales(self._operands.bounds() * 2.0**ROOM) if rounding.scaled else None
        result.cast(self._outs, scales)
        for share, message in zip(self._mine, result.messages, strict=True):
            share.of(rounding.messages).copy_(message)
        first = back.start()
        result.keep_errors(self._outs)
        self._finish(back, [first])
        segments = [self._layout.segments(piece) for piece in self._layout.whole()]
        widen(rounding.messages, segments, None if scales is None else 1 / scales, self._slices)

    def _finish(self, back: MessageRounds, first: Sequence[Handle]) -> None:
        """Send this rank's share to the other participants, once the first one has it."""
        for handle in first:
            self._participants.wait(handle)
        for _ in range(2, self._participants.size):
            self._participants.wait(back.start())

    def _swap(self, hop: int, runs: Sequence[Piece]) -> Round:
        """Send runs of the share of the rank ``hop`` places ahead, receive from the one behind."""
        to, source = self._neighbours(hop)
        sends = [(to, self._layout.placed(run, to).of(self._messages)) for run in runs]
        rows = [self._operands.rows[run.section][source, run.start : run.stop] for run in runs]
        return sends, [(source, row) for row in rows]

    def _send_back(self, hop: int, runs: Sequence[Piece]) -> Round:
        """Send runs of this rank's share ``hop`` places ahead, receive from the one behind."""
        # Not by an all-gather: that of Gloo copies through a buffer of its own, as large as the
        # result, and exchanges large messages of a pair mostly one way at a time.
        to, source = self._neighbours(hop)
        sends = [
            (to, self._layout.placed(run, self._participants.rank).of(self._messages))
            for run in runs
        ]
        received = [self._layout.placed(run, source).of(self._messages) for run in runs]
        return sends, [(source, part) for part in received]

    def _neighbours(self, hop: int) -> tuple[int, int]:
        rank, size = self._participants.rank, self._participants.size
        return (rank + hop) % size, (rank - hop) % size
