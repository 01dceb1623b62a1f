"""Adasum from inner products: each rank combines its share of the vectors, or all of them."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from offbeat.functional.messages.sixteen_bits import ROOM, fitting_scales
from offbeat.methods.adasum.operands import Operands
from offbeat.methods.adasum.reduction import Reduction, Statistics
from offbeat.methods.adasum.rounding import Rounding
from offbeat.methods.adasum.slice_layout import Piece, SliceLayout
from offbeat.transport.handle import Handle
from offbeat.transport.messages import MessageRounds, Round


@final
class Gram(Reduction):
    """All-to-all the shares, sum the Gram matrices, combine the shares, all-gather.

    Sends 2 (P-1)/P of the slice's bytes, as an all-reduce does, and one matrix of P x P float64
    for each layer; any number of peers. Extra memory: one slice. Passes over memory: two. With
    16-bit messages the owner of a share uses the rounded combination too, so that all ranks stay
    equal.

    Without ``split`` ("gather") every rank receives the vectors whole and combines them: one hop,
    in which P-1 times the slice's bytes are sent, and P slices of memory. Equal on all ranks, bit
    for bit, where their processors are of one kind: libraries that torch calls round inner products
    by the width of vectors.
    """

    def __init__(
        self, layout: SliceLayout, slices: Sequence[Tensor], rounding: Rounding | None, split: bool
    ) -> None:
        """Allocate the rows and prepare the messages."""
        self._layout, self._participants = layout, layout.participants
        self._slices, self._rounding, self.split = slices, rounding, split
        self._messages = slices if rounding is None else rounding.messages
        pieces = layout.share() if split else layout.whole()
        self._pieces = pieces if self._participants.group is not None else []
        self._runs = layout.runs(self._pieces)
        self._mine = [self._placed(piece, self._participants.rank) for piece in self._pieces]
        self._outs = [piece.of(slices) for piece in self._mine]
        self._operands = Operands(layout, self._mine, self._runs, self._messages, split)
        self._result: Rounding | None = None
        if split and rounding is not None and self._mine:
            segments = self._operands.segments
            self._result = Rounding(self._outs, segments, layout.layers, rounding.wire)
        self._prepare()

    def _prepare(self) -> None:
        group, size = self._participants.group, self._participants.size
        self._there = self._back = None
        if group is None:
            return
        if not self.split:
            rounds = [self._swap(range(1, size), [run]) for run in self._runs]
            self._there = MessageRounds(rounds, group)
            return
        # One partner at a time on near links, so that no rank receives from two: 4 MiB between 4
        # nodes at 250 Mbit/s take 104 ms, and 112 if all send to all at once; the links' floor is
        # 101. The share from the last partner completes one run after the other: the next runs are
        # in flight while the inner products of these are summed. On the way back the first partner
        # gets each run as soon as it is combined.
        last = [self._swap([size - 1], [run]) for run in self._runs]
        others = [self._swap([hop], self._pieces) for hop in range(1, size - 1)]
        self._there = MessageRounds(others + last, group)
        # As a whole where all of it is rounded together first.
        runs = [[run] for run in self._runs] if self._rounding is None else [self._pieces]
        first = [self._send_back(1, run) for run in runs]
        rest = [self._send_back(hop, self._pieces) for hop in range(2, size)]
        self._back = MessageRounds(first + rest, group)

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """Vectors before they are sent, and this rank's share of the combination."""
        if self._rounding is None or not self._mine:
            return []
        own = self._layout.whole(), self._rounding
        return [own] if self._result is None else [own, (self._mine, self._result)]

    @property
    def memory(self) -> list[Tensor]:
        """The buffers of messages and of other participants' vectors."""
        result = self._result.messages if self._result is not None else []
        return [*self._messages, *self._operands.rows, *result]

    def compare(self) -> Statistics:
        """Exchange shares or whole vectors."""
        self._operands.begin()
        rounding = self._rounding
        if self._there is not None:
            if self._there.expect():
                self._operands.expect()
            if rounding is not None:
                rounding.cast(self._slices)
            flying = list[Handle]()
            for _ in range(1, self._participants.size - 1 if self.split else 1):
                flying.append(self._there.start())
                self._participants.end_hop(flying)
            launched = [self._there.start() for _ in self._runs]
            self._operands.expect()  # at the latest, and not sooner: see MessageRounds
            # While messages travel.
            self._operands.keep([piece.of(self._messages) for piece in self._mine])
            for handle in flying:
                self._participants.wait(handle)
            for index, handle in enumerate(launched):
                self._participants.wait(handle)
                self._operands.add(index)
        return self._operands.analyze(None if rounding is None else rounding.scales)

    def combine(self) -> None:
        """Combine what this rank holds, and send its share to all others."""
        if self._rounding is not None and self._mine:
            self._rounding.keep_errors(self._slices)
        redone, back, first = self._operands.redo(self._outs), self._back, list[Handle]()
        if back is not None:
            back.expect()  # not before redo(), which exchanges messages of its own
        for index in range(len(self._runs)):
            self._operands.combine(index, self._outs, redone)
            if back is not None and self._result is None:
                first.append(back.start())
        if back is None:
            return
        if self._rounding is None or self._result is None:
            self._finish(back, first)
        else:
            self._send_rounded(back, self._rounding, self._result)

    def _send_rounded(self, back: MessageRounds, rounding: Rounding, result: Rounding) -> None:
        # Known to all ranks alike, so that no scale has to be sent.
        scaled = rounding.scales is not None
        scales = fitting_scales(self._operands.bounds() * 2.0**ROOM) if scaled else None
        result.cast(self._outs, scales)
        for share, message in zip(self._mine, result.messages, strict=True):
            share.of(rounding.messages).copy_(message)
        first = back.start()
        result.keep_errors(self._outs)
        self._finish(back, [first])
        rounding.widen(self._slices, scales)

    def _finish(self, back: MessageRounds, first: Sequence[Handle]) -> None:
        """Send this rank's share to the other participants, once the first one has it."""
        flying = [*first]
        for _ in range(2, self._participants.size):
            self._participants.end_hop(flying)
            flying.append(back.start())
        for handle in flying:
            self._participants.wait(handle)

    def _placed(self, run: Piece, rank: int) -> Piece:
        """Return where a run of what participant ``rank`` combines lies in the slice."""
        return self._layout.placed(run, rank) if self.split else run

    def _swap(self, hops: Sequence[int], runs: Sequence[Piece]) -> Round:
        """Send runs of what the ranks some places ahead combine, receive from those behind."""
        ranks = [self._neighbours(hop) for hop in hops]
        sends = [(to, self._placed(run, to).of(self._messages)) for to, _ in ranks for run in runs]
        rows = self._operands.rows
        return sends, [
            (source, rows[run.section][source, run.start : run.stop])
            for _, source in ranks
            for run in runs
        ]

    def _send_back(self, hop: int, runs: Sequence[Piece]) -> Round:
        """Send runs of this rank's share ``hop`` places ahead, receive from the one behind."""
        # Not by an all-gather: that of Gloo copies through a buffer of its own, as large as the
        # result, and exchanges large messages of a pair mostly one way at a time.
        to, source = self._neighbours(hop)
        own, theirs = (
            [self._layout.placed(run, rank).of(self._messages) for run in runs]
            for rank in (self._participants.rank, source)
        )
        return [(to, part) for part in own], [(source, part) for part in theirs]

    def _neighbours(self, hop: int) -> tuple[int, int]:
        rank, size = self._participants.rank, self._participants.size
        return (rank + hop) % size, (rank - hop) % size
