"""Exchanges of snapshots with one partner at a time, in a thread of their own."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.functional import accumulation_dtype, add_half_difference, apply_delta, take_snapshot
from offbeat.transport.group import Group
from offbeat.transport.messages import exchange
from offbeat.transport.patience import outlast
from offbeat.transport.requests import Requests, call

EXCHANGE, SIGN_OFF = 1, 2


@dataclass(eq=False)
class PairExchanger:
    """One participant's side of all its exchanges, which run on the lane of ``group``.

    A bipartite graph excludes deadlocks: even members initiate exchanges, odd members respond.
    An initiator waits for one responder only, and a responder serves one initiator after the
    other; so waits cannot form a circle. Each exchange takes a new snapshot, which contains the
    change of the exchange before.
    """

    group: Group
    published: list[Tensor]  # the model after the last step, by section; the thread reads it
    delta: list[Tensor]  # the sum of what exchanges have changed since; the thread adds to it
    outgoing: list[Tensor]
    incoming: list[Tensor]
    random: torch.Generator
    lock: threading.Lock = field(default_factory=threading.Lock)  # of both
    job: "Future[None] | None" = None
    steps: int = 0
    newest: int = 0  # own steps when the last exchanged snapshot was taken
    staleness: int = 0
    arrived: bool = False

    @classmethod
    def of(cls, published: Sequence[Tensor], group: Group) -> "PairExchanger":
        """Allocate for flat tensors ``published``; each rank draws partners with its own seed."""
        outgoing = [torch.zeros_like(part) for part in published]
        delta = [torch.zeros_like(part, dtype=accumulation_dtype(part.dtype)) for part in published]
        incoming = [torch.zeros_like(part) for part in published]
        random = torch.Generator().manual_seed(group.rank)
        return cls(group, list(published), delta, outgoing, incoming, random)

    @property
    def memory(self) -> list[Tensor]:
        """The changes, and the snapshots of both sides."""
        return [*self.delta, *self.outgoing, *self.incoming]

    @property
    def is_initiator(self) -> bool:
        """Whether this participant initiates exchanges; otherwise it responds."""
        return self.group.rank % 2 == 0

    def apply(self) -> bool:
        """Add ``delta`` to ``published``, under the lock; return False if there was no exchange."""
        self.steps += 1
        self.staleness = self.steps - self.newest
        arrived, self.arrived = self.arrived, False
        if arrived:
            for part, delta in zip(self.published, self.delta, strict=True):
                apply_delta(part, delta)
        return arrived

    def start(self) -> None:
        """Start the next exchange after a step, unless one is running, or start to respond."""
        if not self.is_initiator:
            # One job from the first step until all initiators have left. If all have left and
            # this rank still steps, they are in finish(): a new job would wait for them.
            self.job = self.job or self.group.lane.submit(self._respond)
        elif self.job is None or self.job.done():
            pairs = self.group.size // 2
            draw = torch.randint(pairs, (), generator=self.random, device="cpu")
            self.job = self.group.lane.submit(self._initiate, 1 + 2 * int(draw))

    def raise_error(self) -> None:
        """Raise the error that ended the thread, if there was one."""
        if self.job is not None and self.job.done():
            self.job.result()

    def quiesce(self) -> None:
        """End all exchanges until the next step; all members call after equally many steps."""
        if self.job is None:
            return
        # An initiator signs off when its exchange is over, and a responder continues until all
        # initiators have signed off. So both sides of every pair have added their halves.
        jobs = [self.job]
        if self.is_initiator:
            jobs.append(self.group.lane.submit(self._sign_off))
        for job in jobs:
            with self.group.detector.watching():
                outlast(job, self.group)
        self.job = None

    def clear(self) -> None:
        """Discard what exchanges have changed since the last step."""
        for delta in self.delta:
            delta.zero_()
        self.newest, self.arrived = self.steps, False

    def _initiate(self, partner: int) -> None:
        with self.group.detector.attending():
            call(EXCHANGE, [partner], self.group)
            self._exchange(partner)

    def _sign_off(self) -> None:
        call(SIGN_OFF, range(1, self.group.size, 2), self.group)

    def _respond(self) -> None:
        initiators = set(range(0, self.group.size, 2))
        calls = Requests(self.group, sorted(initiators))
        with self.group.detector.attending():
            while initiators and (received := calls.next()) is not None:
                initiator, word = received
                if word == SIGN_OFF:
                    initiators.remove(initiator)
                else:
                    self._exchange(initiator)
                    calls.expect(initiator)

    def _exchange(self, partner: int) -> None:
        with self.lock:
            taken = self.steps
            for part, delta, out in zip(self.published, self.delta, self.outgoing, strict=True):
                take_snapshot(part, delta, out)
        sends = [(partner, part) for part in self.outgoing]
        receives = [(partner, part) for part in self.incoming]
        with self.group.detector.explaining():
            exchange(sends, receives, self.group).join()
        with self.lock:
            for delta, mine, theirs in zip(self.delta, self.outgoing, self.incoming, strict=True):
                add_half_difference(delta, mine, theirs)
            self.newest, self.arrived = taken, True
