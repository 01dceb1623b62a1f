"""Snapshots swapped with one partner at a time, in a thread of their own."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.comm.calls import Calls, call
from offbeat.comm.group import Group
from offbeat.comm.messages import exchange
from offbeat.functional import accumulation_dtype, add_half_difference, apply_delta, take_snapshot

VISIT, GOODBYE = 1, 2


@dataclass(eq=False)
class PairExchanger:
    """One participant's side of all its exchanges, which run on the lane of ``group``.

    The bipartite graph that keeps them from deadlock: even members visit, odd ones answer. A
    visitor waits for an answer only, and who answers waits for the one who visits right now, one
    after the other; so no circle of waits can close.

    ``published`` is the model as its owner's last step left it, ``delta`` what exchanges have
    brought since. The thread reads the one and adds to the other, under ``lock``, and touches no
    parameter. A snapshot is taken for each exchange and used once: what the last one brought is
    in the next.
    """

    group: Group
    published: list[Tensor]
    delta: list[Tensor]
    outbox: list[Tensor]
    inbox: list[Tensor]
    random: torch.Generator
    lock: threading.Lock = field(default_factory=threading.Lock)
    job: "Future[None] | None" = None
    steps: int = 0
    newest: int = 0  # of own steps, when the last snapshot that met another was taken
    staleness: int = 0
    arrived: bool = False

    @classmethod
    def of(cls, published: Sequence[Tensor], group: Group) -> "PairExchanger":
        """For the flat tensors ``published``; each rank draws its partners from its own seed."""
        outbox = [torch.zeros_like(part) for part in published]
        delta = [torch.zeros_like(part, dtype=accumulation_dtype(part.dtype)) for part in published]
        inbox = [torch.zeros_like(part) for part in published]
        random = torch.Generator().manual_seed(group.rank)
        return cls(group, list(published), delta, outbox, inbox, random)

    @property
    def visits(self) -> bool:
        """Whether this participant visits; otherwise it answers."""
        return self.group.rank % 2 == 0

    def absorb(self) -> bool:
        """Add what has arrived to ``published``; False if nothing has. Under the lock."""
        self.steps += 1
        self.staleness = self.steps - self.newest
        arrived, self.arrived = self.arrived, False
        if arrived:
            for part, delta in zip(self.published, self.delta, strict=True):
                apply_delta(part, delta)
        return arrived

    def go_on(self) -> None:
        """A step is done: visit the next partner, unless on the way, or be there for visitors."""
        if not self.visits:
            # One job from the first step to the goodbyes. If all have come and this rank still
            # steps, its visitors are in finish() already: a new job would wait for them there.
            self.job = self.job or self.group.lane.submit(self._answer)
        elif self.job is None or self.job.done():
            partner = 1 + 2 * int(torch.randint(self.group.size // 2, (), generator=self.random))
            self.job = self.group.lane.submit(self._visit, partner)

    def raise_error(self) -> None:
        """Raise what ended the thread, if something did."""
        if self.job is not None and self.job.done():
            self.job.result()

    def quiesce(self) -> None:
        """End all exchanges until the next step; everyone must call after as many steps.

        A visitor says goodbye when its exchange is over, who answers goes on until all have.
        So what one side of a pair has added the other has too.
        """
        if self.job is None:
            return
        jobs = [self.job]
        if self.visits:
            jobs.append(self.group.lane.submit(self._leave))
        for job in jobs:
            with self.group.heartbeat.watching():
                job.result()
        self.job = None

    def clear(self) -> None:
        """Forget what has arrived."""
        for delta in self.delta:
            delta.zero_()
        self.newest, self.arrived = self.steps, False

    def _visit(self, partner: int) -> None:
        with self.group.heartbeat.attending():
            call(VISIT, [partner], self.group)
            self._swap(partner)

    def _leave(self) -> None:
        call(GOODBYE, range(1, self.group.size, 2), self.group)

    def _answer(self) -> None:
        visitors = set(range(0, self.group.size, 2))
        calls = Calls(self.group, sorted(visitors))
        with self.group.heartbeat.attending():
            while visitors and (heard := calls.next()) is not None:
                visitor, word = heard
                if word == GOODBYE:
                    visitors.remove(visitor)
                else:
                    self._swap(visitor)
                    calls.expect(visitor)

    def _swap(self, partner: int) -> None:
        with self.lock:
            taken = self.steps
            for part, delta, out in zip(self.published, self.delta, self.outbox, strict=True):
                take_snapshot(part, delta, out)
        sends = [(partner, part) for part in self.outbox]
        receives = [(partner, part) for part in self.inbox]
        with self.group.heartbeat.explaining():
            exchange(sends, receives, self.group).join()
        with self.lock:
            for delta, mine, theirs in zip(self.delta, self.outbox, self.inbox, strict=True):
                add_half_difference(delta, mine, theirs)
            self.newest, self.arrived = taken, True
