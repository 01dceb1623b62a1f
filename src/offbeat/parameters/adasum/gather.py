"""Everybody sends all to all, and combines all: one exchange where others need three."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from offbeat.comm.messages import MessageRounds, Round
from offbeat.parameters.adasum.operands import Operands
from offbeat.parameters.adasum.reduction import Reduction, Statistics
from offbeat.parameters.adasum.rounding import Rounding
from offbeat.parameters.adasum.slices import Piece, SliceLayout


@final
class Gather(Reduction):
    """Everybody gets every vector and combines all of them.

    Sends P-1 times the slice's bytes, in one hop: no more than an all-reduce between two. Extra
    memory: P slices. Passes over memory: two over all P slices.

    Equal on all ranks, bit for bit, where their processors are of one kind: libraries that torch
    calls round inner products by the width of vectors. Others need :class:`Gram`, where each share
    is combined once.
    """

    def __init__(
        self, cut: SliceLayout, slices: Sequence[Tensor], narrow: Rounding | None = None
    ) -> None:
        """Allocate the rows and prepare the messages."""
        group, self._peers = cut.peers.group, cut.peers
        self._slices, self._narrow = slices, narrow
        self._messages = slices if narrow is None else narrow.messages
        self._pieces = cut.whole() if group is not None else []
        self._outs = [piece.of(slices) for piece in self._pieces]
        self._runs = cut.runs(self._pieces)
        self._rows = Operands(cut, self._pieces, self._runs, self._messages, split=False)
        self._rounds = MessageRounds([self._round(r) for r in self._runs], group) if group else None

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """Vectors are rounded when they leave; what is made of them is not."""
        return [] if self._narrow is None else [(self._pieces, self._narrow)]

    def compare(self) -> Statistics:
        """Gather all vectors."""
        self._rows.begin()
        narrow = self._narrow
        if self._rounds is not None:
            self._rounds.expect()
            if narrow is not None:
                narrow.cast(self._slices)
            self._rows.keep(self._messages)
            launched = [self._rounds.start() for _ in self._runs]
            for index, handle in enumerate(launched):
                self._peers.wait(handle)
                self._rows.add(index)
        return self._rows.judge(narrow.scales if narrow is not None and narrow.scaled else None)

    def combine(self) -> None:
        """Combine the whole slice here, without another message."""
        if self._narrow is not None and self._outs:
            self._narrow.keep_errors(self._slices)
        redone = self._rows.redo(self._outs)
        for index in range(len(self._runs)):
            self._rows.combine(index, self._outs, redone)

    def _round(self, run: Piece) -> Round:
        rank, size, rows = self._peers.rank, self._peers.size, self._rows.rows[run.section]
        others = [(rank + hop) % size for hop in range(1, size)]
        mine = run.of(self._messages)
        return [(o, mine) for o in others], [(o, rows[o, run.start : run.stop]) for o in others]
