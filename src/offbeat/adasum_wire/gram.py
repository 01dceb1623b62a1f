"""Each rank combines its own share, with coefficients that follow from inner products."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from offbeat.adasum_wire.cut import Cut, Piece
from offbeat.adasum_wire.narrow import ROOM, Narrow, fitting, widen
from offbeat.adasum_wire.rows import Rows
from offbeat.adasum_wire.wire import Verdict, Wire
from offbeat.collectives import Handle, Transfer, exchange


@final
class Gram(Wire):
    """All-to-all the shares, sum the Gram matrices, combine the shares, all-gather.

    Sends 2 (P-1)/P of the slice's bytes, as an all-reduce does, and one matrix of P x P float64
    for each layer; any number of peers. Extra memory: one slice. Passes over memory: two.

    With 16 bits on the wire vectors are rounded when they leave and combinations when they are
    handed out; the owner of a share uses the rounded one too, so that all ranks stay equal.
    """

    def __init__(self, cut: Cut, slices: Sequence[Tensor], narrow: Narrow | None = None) -> None:
        """Allocate the rows."""
        self._peers, self._cut, self._narrow = cut.peers, cut, narrow
        joined = cut.peers.group is not None
        self._share, self._runs = (cut.share(), cut.runs()) if joined else ([], [])
        self._mine = [cut.placed(section, cut.peers.rank) for section in self._share]
        messages = slices if narrow is None else narrow.messages
        self._rows = Rows(cut, self._mine, self._runs, messages, split=True)
        self._result: Narrow | None = None
        if narrow is not None and self._mine:
            mine = [share.of(slices) for share in self._mine]
            self._result = Narrow(mine, self._rows.spans, cut.layers, narrow.wire)

    @property
    def roundings(self) -> list[tuple[list[Piece], Narrow]]:
        """Vectors when they leave, and this rank's share of the combination."""
        if self._narrow is None or self._result is None:
            return []
        return [(self._cut.whole(), self._narrow), (self._mine, self._result)]

    def compare(self, slices: Sequence[Tensor]) -> Verdict:
        """Give every peer its share, and take this rank's from all of them."""
        self._rows.begin()
        narrow = self._narrow
        if narrow is not None and self._mine:
            narrow.cast(slices)
        messages = slices if narrow is None else narrow.messages
        for rows, share in zip(self._rows.rows, self._mine, strict=True):
            rows[self._peers.rank].copy_(share.of(messages))
        # One peer at a time: nobody receives from two. 4 MiB between 4 nodes at 250 Mbit/s take
        # 104 ms, and 112 if all send to all at once; the links' floor is 101.
        for hop in range(1, self._peers.size - 1 if self._runs else 0):
            self._peers.wait(self._swap(hop, self._share, messages))
        # What the last peer sends completes one run after the other: the next ones travel while
        # inner products of these are summed.
        last = [self._swap(self._peers.size - 1, [run], messages) for run in self._runs]
        for index, handle in enumerate(last):
            self._peers.wait(handle)
            self._rows.add(index)
        return self._rows.judge(narrow.scales if narrow is not None and narrow.scaled else None)

    def combine(self, slices: Sequence[Tensor]) -> None:
        """Combine this rank's share, and hand it out."""
        if self._narrow is not None and self._mine:
            self._narrow.keep_errors(slices)
        mine = [share.of(slices) for share in self._mine]
        redone = self._rows.redo(mine)
        if self._narrow is not None:
            self._combine_narrow(slices, mine, redone)
            return
        first = []
        for index, run in enumerate(self._runs):
            self._rows.combine(index, mine, redone)
            first.append(self._hand_out(1, [run], slices))
        self._finish(first, slices)

    def _combine_narrow(
        self, slices: Sequence[Tensor], mine: Sequence[Tensor], redone: set[int]
    ) -> None:
        narrow, result = self._narrow, self._result
        if narrow is None or result is None:
            return
        for index in range(len(self._runs)):
            self._rows.combine(index, mine, redone)
        # Known to all peers alike, so that no scale has to travel.
        scales = fitting(self._rows.bounds() * 2.0**ROOM) if narrow.scaled else None
        result.cast(mine, scales)
        for share, message in zip(self._mine, result.messages, strict=True):
            share.of(narrow.messages).copy_(message)
        first = [self._hand_out(1, self._share, narrow.messages)]
        result.keep_errors(mine)
        self._finish(first, narrow.messages)
        spans = [self._cut.spans(piece) for piece in self._cut.whole()]
        widen(narrow.messages, spans, None if scales is None else 1 / scales, slices)

    def _swap(self, hop: int, runs: Sequence[Piece], messages: Sequence[Tensor]) -> Handle:
        """Send runs of the share of the peer ``hop`` places ahead, receive from the one behind."""
        to, source = self._neighbours(hop)
        sends = [(to, self._cut.placed(run, to).of(messages)) for run in runs]
        rows = [self._rows.rows[run.section][source, run.start : run.stop] for run in runs]
        return self._exchange(sends, [(source, row) for row in rows])

    def _hand_out(self, hop: int, runs: Sequence[Piece], messages: Sequence[Tensor]) -> Handle:
        """Send runs of this rank's share ``hop`` places ahead, receive from the one behind."""
        # Not by an all-gather: Gloo's fills a buffer of its own, as large as the result, and
        # copies it; and it sends a large message of a pair one way at a time, mostly.
        to, source = self._neighbours(hop)
        sends = [(to, self._cut.placed(run, self._peers.rank).of(messages)) for run in runs]
        receives = [(source, self._cut.placed(run, source).of(messages)) for run in runs]
        return self._exchange(sends, receives)

    def _finish(self, first: Sequence[Handle], messages: Sequence[Tensor]) -> None:
        """Hand this rank's share to all others too, once the first has it."""
        for handle in first:
            self._peers.wait(handle)
        for hop in range(2, self._peers.size if self._runs else 0):
            self._peers.wait(self._hand_out(hop, self._share, messages))

    def _neighbours(self, hop: int) -> tuple[int, int]:
        rank, size = self._peers.rank, self._peers.size
        return (rank + hop) % size, (rank - hop) % size

    def _exchange(self, sends: list[Transfer], receives: list[Transfer]) -> Handle:
        assert self._peers.group is not None, "shares belong to ranks with counterparts"
        return exchange(sends, receives, self._peers.group)
