"""The end of the exchange of a backward: in an elastic run a transaction, repeated after a loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import final

from offbeat.elastic.agreement import Stage
from offbeat.elastic.generation import Generation
from offbeat.liveness.failure import PeerLost

Transact = Callable[[Callable[[], None]], None]


@final
class GradientExchange:
    """Gives the slot the gradients of a backward as they are ready, and ends their exchange.

    ``transact`` makes a call, and again after a loss, once :meth:`follow` was called; for runs in
    which exchanges of gradients go on then.
    """

    def __init__(self, members: Generation, transact: Transact) -> None:
        self._loss: PeerLost | None = None  # at a launch in this backward
        self._seen: list[str] = []  # the gradients of this backward
        self._has_begun = False  # this backward, in a run with weights
        self._members, self._transaction = members, transact
        self.follow()

    def follow(self) -> None:
        """Exchange from now on between those who take part, by the present method."""
        members = self._members
        self.slot, self.heartbeat = members.gradients, members.heartbeat
        self.buffers = members.buffers
        self._transact = self._transaction if members.filler.exchanges_again else None
        is_weighted = self.slot.site is not None and self.slot.site.weights is not None
        self._ready = self._agree_at_first if is_weighted else self.slot.ready
        self.ready = self._ready if self._transact is None else self._ready_unless_lost

    def finish(self) -> None:
        """End the exchange of this backward, and copy the buffers of the first rank."""
        self._has_begun = False
        if self._transact is None:
            with self._calling():
                self.slot.finish()
                if self.buffers is not None:
                    self.buffers.copy()
            return
        self._begun = self.slot
        # Two transactions: a rank may have lost the second when another is in the first.
        self._transact(self._finish_again)
        self._seen.clear()
        if self.buffers is not None:
            with self._members.at(Stage.HAS_GRADIENTS):
                self._transact(self._copy_buffers)

    def _agree_at_first(self, name: str) -> None:
        # The first gradient waits for the weights of the others: a rank that waits must say in
        # which call. It is the one that finish() will count.
        if self._has_begun or self.heartbeat is None:
            return self.slot.ready(name)
        self._has_begun = True
        with self.heartbeat.verb("backward"), self._calling():
            self.slot.ready(name)

    def _ready_unless_lost(self, name: str) -> None:
        # Backward computes the other gradients of this rank all the same: they are exchanged
        # between the ranks that are left.
        if self._members.is_behind:
            return
        self._seen.append(name)
        if self._loss is None:
            try:
                self._ready(name)
            except PeerLost as loss:
                self._loss = loss

    def _finish_again(self) -> None:
        loss, self._loss = self._loss, None
        if loss is not None:
            raise loss
        if self._members.has_result():
            return
        with self._calling():
            for name in self._seen if self.slot is not self._begun else ():
                self.slot.ready(name)
            self.slot.finish()

    def _copy_buffers(self) -> None:
        if self.buffers is not None and not self._members.is_behind:
            with self._calling():
                self.buffers.copy()

    def _calling(self) -> AbstractContextManager[None]:
        site = self.slot.site
        if site is None or site.group is None or self.heartbeat is None:
            return nullcontext()
        # The ranks of a node agree on whether the gradients of all their shards are finite.
        beside = site.shards.ranks if site.shards is not None else ()
        return self.heartbeat.backward((*site.group.ranks, *beside))
