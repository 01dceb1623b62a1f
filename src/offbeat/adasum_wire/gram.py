"""Each rank combines its own share, with coefficients that follow from inner products."""

from collections.abc import Sequence
from itertools import product
from typing import final

from torch import Tensor

from offbeat.adasum_wire.cut import Cut, Piece
from offbeat.adasum_wire.narrow import ROOM, Narrow, fitting, widen
from offbeat.adasum_wire.rows import Rows
from offbeat.adasum_wire.wire import Verdict, Wire
from offbeat.collectives import Handle, all_gather, exchange


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
        self._cut, self._narrow = cut, narrow
        self._pieces = cut.pieces() if cut.peers.group is not None else []
        self._shares = [cut.share(piece, cut.peers.rank) for piece in self._pieces]
        messages = slices if narrow is None else narrow.messages
        self._rows = Rows(cut, self._shares, messages, split=True)
        self._result: Narrow | None = None
        if narrow is not None and self._shares:
            mine = [share.of(slices) for share in self._shares]
            self._result = Narrow(mine, self._rows.spans, cut.layers, narrow.wire)

    @property
    def roundings(self) -> list[tuple[list[Piece], Narrow]]:
        """Vectors when they leave, and this rank's share of the combination."""
        if self._narrow is None or self._result is None:
            return []
        return [(self._cut.whole(), self._narrow), (self._shares, self._result)]

    def compare(self, slices: Sequence[Tensor]) -> Verdict:
        """Give every peer its share, and take this rank's from all of them."""
        self._rows.begin()
        narrow = self._narrow
        if narrow is not None and self._pieces:
            narrow.cast(slices)
        messages = slices if narrow is None else narrow.messages
        # One peer at a time: nobody receives from two. 4 MiB between 4 nodes at 250 Mbit/s take
        # 104 ms, and 112 if all send to all at once; the links' floor is 101.
        for index, hop in product(range(len(self._pieces)), range(1, self._cut.peers.size)):
            handle = self._swap(index, hop, messages)
            if index > 0 and hop == 1:  # while this piece travels
                self._rows.add(index - 1)
            self._cut.peers.wait(handle)
        if self._pieces:
            self._rows.add(len(self._pieces) - 1)
        return self._rows.judge(narrow.scales if narrow is not None and narrow.scaled else None)

    def combine(self, slices: Sequence[Tensor]) -> None:
        """Combine this rank's share, and hand it out."""
        if self._narrow is not None and self._pieces:
            self._narrow.keep_errors(slices)
        mine = [share.of(slices) for share in self._shares]
        redone = self._rows.redo(mine)
        if self._narrow is not None:
            self._combine_narrow(slices, mine, redone)
            return
        handles = []
        for index, out in enumerate(mine):
            self._rows.combine(index, out, redone)
            handles.append(self._hand_out(index, out, slices))
        for handle in handles:
            self._cut.peers.wait(handle)

    def _combine_narrow(
        self, slices: Sequence[Tensor], mine: Sequence[Tensor], redone: set[int]
    ) -> None:
        narrow, result = self._narrow, self._result
        if narrow is None or result is None:
            return
        for index, out in enumerate(mine):
            self._rows.combine(index, out, redone)
        # Known to all peers alike, so that no scale has to travel.
        scales = fitting(self._rows.bounds() * 2.0**ROOM) if narrow.scaled else None
        result.cast(mine, scales)
        handles = [
            self._hand_out(index, message, narrow.messages)
            for index, message in enumerate(result.messages)
        ]
        result.keep_errors(mine)
        for handle in handles:
            self._cut.peers.wait(handle)
        spans = [self._cut.spans(piece) for piece in self._cut.whole()]
        widen(narrow.messages, spans, None if scales is None else 1 / scales, slices)

    def _swap(self, index: int, hop: int, messages: Sequence[Tensor]) -> Handle:
        """Send a piece's share to the peer ``hop`` places ahead, receive from the one behind."""
        peers, piece = self._cut.peers, self._pieces[index]
        assert peers.group is not None, "pieces belong to ranks with counterparts"
        rows = self._rows.rows[index]
        if hop == 1:
            rows[peers.rank].copy_(self._shares[index].of(messages))
        to, source = (peers.rank + hop) % peers.size, (peers.rank - hop) % peers.size
        sends = [(to, self._cut.share(piece, to).of(messages))]
        return exchange(sends, [(source, rows[source])], peers.group)

    def _hand_out(self, index: int, share: Tensor, slices: Sequence[Tensor]) -> Handle:
        peers, piece = self._cut.peers, self._pieces[index]
        assert peers.group is not None, "pieces belong to ranks with counterparts"
        if peers.size > 2:
            return all_gather(piece.of(slices), share, peers.group)
        # Gloo's collectives send a large message of a pair one way at a time, mostly: 4 MiB
        # between 2 nodes at 250 Mbit/s take 102 ms, cut as exchange does 68.
        own, other = self._shares[index].of(slices), 1 - peers.rank
        if own.data_ptr() != share.data_ptr():
            own.copy_(share)
        return exchange(
            [(other, share)], [(other, self._cut.share(piece, other).of(slices))], peers.group
        )
