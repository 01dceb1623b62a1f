"""The agreement on the step in which a rank joins or leaves: nobody waits for it in training."""

import threading
import time
from typing import final

from offbeat.elastic.join_barrier import barrier_of, close_barrier
from offbeat.elastic.newcomer import Newcomer, meet
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.status_record import JoinRequest
from offbeat.transport.links import Links

POLL = 0.002  # seconds between two looks for the decision, at first
PAUSE = 0.01  # the same for a request that is about to come
PATIENCE = 0.05  # of a step, for which members wait for one that may be back, if long enough
NEEDED = 0.35  # heartbeats until it has asked and all have heard
AT_HAND = 0.5  # of a step, for which they wait for one that is back, but a heartbeat at most
HEARD = 0.1  # heartbeats until that one has asked and all have heard
NEVER = "never"  # in the place of the step: the request is withdrawn


@final
class Admission:
    r"""What one member knows about the present request to join or to leave, under any method.

    1. The newcomer, or the member that leaves, writes its request into the status record, which
       all read at each heartbeat.
    2. The thread of each member's heartbeat acknowledges it with a limit l: no ``step()`` from
       number l on begins here before the decision is known.
    3. Who acknowledges last writes the decision, the step of the admission.

    .. math:: S = \max_i l_i

    A newcomer comes at the beginning of that step, a member leaves at the end of one. Nobody has
    begun step S when it is decided, and everyone reads the decision before. Limits are as many
    steps ahead as fit in the time in which all acknowledge: then no member waits long for the
    decision; and of slow steps the present one, if it has not begun its ``step()``. The
    acknowledgement must not come from the training thread: a member may be in an exchange with one
    that waits for it.
    """

    def __init__(self, links: Links | None, before: "Admission | None" = None) -> None:
        """Acknowledge requests from now on; ``before``: that of the ranks until now."""
        self._links, self._changing = links, threading.Lock()
        self._request: JoinRequest | None = None
        self._newcomers: list[Newcomer] = []
        steps = links.heartbeat.phase.steps if links is not None else 0
        # As the heartbeat counts steps; the one in which ranks change has begun.
        self._limit, self._ahead, self._begun = 0, 0, steps + 1
        self._looked = time.monotonic(), steps
        # By request: while this rank is in one, the next may come.
        self._decided: tuple[JoinRequest | None, int | None] = None, None
        self.refused: JoinRequest | None = None
        self.wants_to_leave: bool = before is not None and before.wants_to_leave
        self._began: float = time.monotonic() if before is None else before._began
        self._pace: float = 0.0 if before is None else before._pace  # seconds of the last step
        self._lost_from: str | None = None  # the ranks that one was lost from, since it may return
        if links is not None:
            links.heartbeat.hear_request = self._acknowledge
            links.heartbeat.expects = bool(links.run and links.world.lost)
            if before is not None and before._links is not None and links.heartbeat.expects:
                self._lost_from = before._links.name

    @property
    def lets_go(self) -> bool:
        """Whether a member waits to leave."""
        if self.wants_to_leave:
            return True
        request, links = self._request, self._links
        return request is not None and links is not None and request.rank in links.world.ranks

    @property
    def has_met(self) -> bool:
        """Whether this member notices the end of a newcomer, as far as it is to watch it."""
        return all(newcomer.is_met for newcomer in self._newcomers)

    def begin_step(self) -> bool:
        """Note that a ``step()`` begins; return whether a rank waits, or one is lost."""
        if (links := self._links) is None:
            return False
        now = time.monotonic()
        self._began, self._pace = now, now - self._began
        with self._changing:
            # In one: who acknowledges after this must not count on the step.
            self._begun = links.heartbeat.phase.steps + 1
            has_news = self._request is not None or links.heartbeat.has_agreed_error
        return has_news or self._lost_from is not None

    def due(self, joins: bool) -> JoinRequest | None:
        """Return the request to join, or to leave, that is due now, if there is one."""
        if joins and self._lost_from is not None and self._links is not None:
            self._await_return(self._links, self._lost_from)
        with self._changing:
            request, limit, links = self._request, self._limit, self._links
        if request is None or links is None or request == self.refused:
            return None
        if joins == (request.rank in links.world.ranks):
            return None
        number = links.heartbeat.phase.steps
        if number >= limit and self._decided[0] != request:
            self._decided = request, self._await_decision(request, links)
        decided, step = self._decided
        return request if decided == request and step is not None and number >= step else None

    def _await_return(self, links: Links, lost_from: str) -> None:
        """Wait a moment for a lost rank that is back: of slow steps it would miss a whole one.

        It can ask only now, since all know of its loss.
        """
        self._lost_from, beat = None, heartbeat.BEAT
        with links.heartbeat.watching():
            is_at_hand = links.store.find("back") == lost_from
        seconds = min(AT_HAND * self._pace, beat) if is_at_hand else PATIENCE * self._pace
        if seconds < (HEARD if is_at_hand else NEEDED) * beat:
            return
        with self._changing:
            self._begun -= 1  # who acknowledges meanwhile counts on this step
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._request is None:
            if links.heartbeat.has_agreed_error:
                break
            if is_at_hand:
                links.heartbeat.look_at_once()
            time.sleep(PAUSE)
        with self._changing:
            self._begun += 1

    def _acknowledge(self, request: JoinRequest | None) -> None:
        links = self._links
        assert links is not None, "it listens to its heartbeat"
        (before, had), now, steps = self._looked, time.monotonic(), links.heartbeat.phase.steps
        # A shorter time holds one step or none, which says nothing about slow ones.
        if now - before >= heartbeat.BEAT:
            self._looked = now, steps
            soon = heartbeat.BEAT / (heartbeat.LOOKS if links.heartbeat.expects else 1)
            self._ahead = int(soon * (steps - had) / (now - before))
        if request is None and self.wants_to_leave:
            number = links.store.add("requests", 1)
            links.heartbeat.ask(None, JoinRequest(links.world.rank, number))
        if request == self._request:
            self._withdraw_if_gone(links)
            return
        leaves = request is not None and request.rank in links.world.ranks
        with self._changing:
            # In this order: a step that begins meanwhile sees the request, or counts below.
            self._request = request
            steps = links.heartbeat.phase.steps
            self._limit = steps + max(self._ahead, 1)
            if not leaves:
                self._limit = max(steps + self._ahead, self._begun)
        self.close()
        if request is None:
            return
        if not leaves:
            self._newcomers = [Newcomer(links, request, rank) for rank in request.ranks]
            meet(self._newcomers)
        barrier = barrier_of(links.store, links.name, request.number)
        barrier.append("limits", f"{self._limit} ")
        if barrier.add("acknowledged", 1) == len(links.world.ranks):
            step = max(map(int, barrier.get("limits").split()))
            barrier.compare_set("step", "", str(step))

    def _withdraw_if_gone(self, links: Links) -> None:
        """Let in nobody who has ended meanwhile, and let the next one ask."""
        request, gone = self._request, [newcomer.is_gone() for newcomer in self._newcomers]
        if request is None or not any(gone):
            return
        barrier = barrier_of(links.store, links.name, request.number)
        close_barrier(barrier)
        # Once the step is decided all come to it: a rank that has read of it already waits there
        # for the others, and the request is withdrawn then.
        if barrier.compare_set("step", "", NEVER).decode() == NEVER:
            links.heartbeat.ask(request, None)

    def close(self) -> None:
        """Watch the newcomers no more."""
        for newcomer in self._newcomers:
            newcomer.close()
        self._newcomers = []

    def _await_decision(self, request: JoinRequest, links: Links) -> int | None:
        """Return the step of the admission; None if the request is withdrawn first."""
        barrier, wait = barrier_of(links.store, links.name, request.number), POLL
        # In no call: after a step, others may be in the exchange of the next backward already, and
        # would take this rank, which has not begun it, for one that has left it out.
        with links.heartbeat.watching():
            while request == self._request:
                links.heartbeat.raise_agreed_error()
                if (step := barrier.find("step")) is not None:
                    return None if step == NEVER else int(step)
                time.sleep(wait)
                wait = min(2 * wait, heartbeat.BEAT / 10)
        return None
