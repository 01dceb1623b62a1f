"""One all-gather, and the combination on every rank: for what fits a few packets."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from offbeat.adasum_wire.cut import Cut, Piece
from offbeat.adasum_wire.narrow import Narrow
from offbeat.adasum_wire.rows import Rows
from offbeat.adasum_wire.wire import Verdict, Wire
from offbeat.collectives import all_gather


@final
class Gather(Wire):
    """Everybody gets every vector and combines all of them.

    Sends P-1 times the slice's bytes in one collective, where others need three. Extra memory:
    P slices. Passes over memory: two over all P slices.
    """

    def __init__(self, cut: Cut, slices: Sequence[Tensor], narrow: Narrow | None = None) -> None:
        """Allocate the rows."""
        self._peers, self._narrow = cut.peers, narrow
        self._pieces = cut.whole() if cut.peers.group is not None else []
        messages = slices if narrow is None else narrow.messages
        self._rows = Rows(cut, self._pieces, self._pieces, messages, split=False)

    @property
    def roundings(self) -> list[tuple[list[Piece], Narrow]]:
        """Vectors are rounded when they leave; what is made of them is not."""
        return [] if self._narrow is None else [(self._pieces, self._narrow)]

    def compare(self, slices: Sequence[Tensor]) -> Verdict:
        """Gather all vectors."""
        self._rows.begin()
        narrow, group = self._narrow, self._peers.group
        if group is not None:
            if narrow is not None:
                narrow.cast(slices)
            messages = slices if narrow is None else narrow.messages
            for index, (rows, message) in enumerate(zip(self._rows.rows, messages, strict=True)):
                self._peers.wait(all_gather(rows.view(-1), message, group))
                self._rows.add(index)
        return self._rows.judge(narrow.scales if narrow is not None and narrow.scaled else None)

    def combine(self, slices: Sequence[Tensor]) -> None:
        """Combine the whole slice here, without another message."""
        outs = [piece.of(slices) for piece in self._pieces]
        if self._narrow is not None and outs:
            self._narrow.keep_errors(slices)
        redone = self._rows.redo(outs)
        for index in range(len(outs)):
            self._rows.combine(index, outs, redone)
