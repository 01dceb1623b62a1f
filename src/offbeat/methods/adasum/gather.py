"""Adasum by an all-gather: one exchange, where the other algorithms need three."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from offbeat.methods.adasum.operands import Operands
from offbeat.methods.adasum.reduction import Reduction, Statistics
from offbeat.methods.adasum.rounding import Rounding
from offbeat.methods.adasum.slice_layout import Piece, SliceLayout
from offbeat.transport.messages import MessageRounds, Round


@final
class Gather(Reduction):
    """All-gathers the vectors; every rank combines all of them.

    Sends P-1 times the slice's bytes, in one hop: no more than an all-reduce between two. Extra
    memory: P slices. Passes over memory: two over all P slices.

    Equal on all ranks, bit for bit, where their processors are of one kind: libraries that torch
    calls round inner products by the width of vectors. Others need :class:`Gram`, where each share
    is combined once.
    """

    def __init__(
        self, layout: SliceLayout, slices: Sequence[Tensor], rounding: Rounding | None = None
    ) -> None:
        """Allocate the rows and prepare the messages."""
        group, self._participants = layout.participants.group, layout.participants
        self._slices, self._rounding = slices, rounding
        self._messages = slices if rounding is None else rounding.messages
        self._pieces = layout.whole() if group is not None else []
        self._outs = [piece.of(slices) for piece in self._pieces]
        self._runs = layout.runs(self._pieces)
        self._operands = Operands(layout, self._pieces, self._runs, self._messages, split=False)
        self._rounds = MessageRounds([self._round(r) for r in self._runs], group) if group else None

    @property
    def roundings(self) -> list[tuple[list[Piece], Rounding]]:
        """Vectors are rounded before they are sent; their combination is not."""
        return [] if self._rounding is None else [(self._pieces, self._rounding)]

    @property
    def memory(self) -> list[Tensor]:
        """The buffers of messages and of other participants' vectors."""
        return [*self._messages, *self._operands.rows]

    def compare(self) -> Statistics:
        """Gather the vectors of all participants."""
        self._operands.begin()
        rounding = self._rounding
        if self._rounds is not None:
            self._rounds.expect()
            if rounding is not None:
                rounding.cast(self._slices)
            self._operands.keep(self._messages)
            launched = [self._rounds.start() for _ in self._runs]
            for index, handle in enumerate(launched):
                self._participants.wait(handle)
                self._operands.add(index)
        return self._operands.analyze(
            rounding.scales if rounding is not None and rounding.scaled else None
        )

    def combine(self) -> None:
        """Combine the whole slice locally."""
        if self._rounding is not None and self._outs:
            self._rounding.keep_errors(self._slices)
        redone = self._operands.redo(self._outs)
        for index in range(len(self._runs)):
            self._operands.combine(index, self._outs, redone)

    def _round(self, run: Piece) -> Round:
        rank, size, rows = (
            self._participants.rank,
            self._participants.size,
            self._operands.rows[run.section],
        )
        others = [(rank + hop) % size for hop in range(1, size)]
        mine = run.of(self._messages)
        return [(o, mine) for o in others], [(o, rows[o, run.start : run.stop]) for o in others]
