"""Requests to join: in which step they are due, and that of a rank which has ended."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import offbeat
from crowd import Crowd
from offbeat.elastic.admission import NEVER, Admission
from offbeat.elastic.join_barrier import barrier_of, come, let_in
from offbeat.elastic.newcomer import Newcomer
from offbeat.liveness.failure import Phase
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.beacon import Beacon, Place
from offbeat.liveness.heartbeats.beat import Beat
from offbeat.liveness.heartbeats.probe import Probe
from offbeat.liveness.heartbeats.status_record import JoinRequest
from offbeat.transport.links import Links
from offbeat.transport.world import World

pytestmark = pytest.mark.usefixtures("impatient")

HOST = "127.0.0.1"


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of a heartbeat counts fast steps."""
    monkeypatch.setattr(heartbeat, "BEAT", 1000.0)


@pytest.fixture
def links() -> Iterator[Links]:
    """Those of the only rank of a run."""
    made = Links.connect(World.at(HashStore(), size=1, rank=0), run=1)
    yield made
    made.close(at_once=True)


def deaf(links: Links, before: Admission | None = None) -> Admission:
    """Acknowledge requests in the test alone: the first look of the heartbeat may be late."""
    made = Admission(links, before)
    links.heartbeat.hear_request = None
    return made


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(
    ("slow", "is_at_hand", "comes"), [(400.0, False, True), (8.0, True, True), (8.0, False, False)]
)
def test_members_with_slow_steps_wait_a_moment_for_a_lost_rank(
    links: Links, monkeypatch: pytest.MonkeyPatch, slow: float, is_at_hand: bool, comes: bool
) -> None:
    """It could not ask before all knew of its loss; once they go on, the next step is its first.

    They wait for a twentieth of a step, and for half of one if they read that it is back.
    """
    monkeypatch.setattr("offbeat.elastic.admission.NEEDED", 0.0)
    monkeypatch.setattr("offbeat.elastic.admission.HEARD", 0.0)
    before = deaf(links)
    if is_at_hand:
        links.store.set("back", links.name)
    links.world = replace(links.world, lost=(1,))
    before._began -= slow
    admission, request = deaf(links, before), JoinRequest(1, 1)
    monkeypatch.setattr(heartbeat, "BEAT", 1000.0)  # the most that they wait
    assert admission.begin_step(), "somebody may come"
    looks = list[float]()
    monkeypatch.setattr(links.heartbeat, "look_at_once", lambda: looks.append(time.monotonic()))
    thread = threading.Timer(0.6, admission._acknowledge, [request])
    thread.start()
    assert admission.due(joins=True) == (request if comes else None)
    assert bool(looks) == is_at_hand
    thread.join()
    links.heartbeat.next_call("step")
    assert admission.begin_step()
    assert admission.due(joins=True) == request


@pytest.mark.usefixtures("still")
def test_a_request_is_due_in_the_first_step_that_begins_after_it(links: Links) -> None:
    """However the thread of the heartbeat and the training one take turns."""
    admission, beat = deaf(links), links.heartbeat
    first, second = JoinRequest(1, 1), JoinRequest(1, 2)
    assert not admission.begin_step()
    admission._acknowledge(first)
    assert admission.due(joins=True) is None, "the step that has begun without it goes on so"
    assert admission.due(joins=False) is None, "nobody leaves"
    beat.next_call("step")
    assert admission.begin_step()
    assert admission.due(joins=True) == first
    beat.next_call("step")
    admission._acknowledge(None)
    admission._acknowledge(second)
    assert admission.begin_step()
    assert admission.due(joins=True) == second, "the next step had not begun"
    admission.refused = first
    assert admission.due(joins=True) == second, "whatever became of the one before"
    admission._acknowledge(JoinRequest(0, 3))
    assert admission.due(joins=False) is None, "at the end of the next step"
    beat.next_call("step")
    assert admission.due(joins=False) == JoinRequest(0, 3)
    admission.close()


def test_one_who_asks_during_a_slow_step_comes_in_at_its_end() -> None:
    waits = threading.Event()

    def work(world: World) -> list[dict[str, int]]:
        replica = offbeat.replicate(
            torch.nn.Linear(2, 1), offbeat.local_sgd(every=50), mesh=world, elastic=True
        )
        links = replica._connection.links
        assert links is not None
        while replica.steps < 5:
            replica.step()
        if not replica.joined:
            time.sleep(6 * heartbeat.BEAT)
            waits.set()
            asked = barrier_of(links.store, links.name, 1)
            while asked.find("step") is None:
                time.sleep(0.01)
            replica.step()
        replica.finish()
        replica.detach()
        return replica.joined

    crowd = Crowd(3, work)

    def come() -> None:
        waits.wait(30)
        crowd.come(crowd.world.newcomer())

    coming = threading.Thread(target=come)
    coming.start()
    assert crowd.all()[:3] == [[{"rank": 3, "step": 5}]] * 3
    coming.join()


def write_beat(links: Links, request: JoinRequest, number: int, place: Place | None) -> None:
    """As the newcomer does, under the name of the links after it has joined."""
    store = links.store.under(f"run1.1 with {request.number}/heartbeat")
    store.set(f"rank{request.rank}", json.dumps(Beat(number, 1.0, Phase(), None, place)))


def look(newcomer: Newcomer, seconds: float) -> bool:
    until, gone = time.monotonic() + seconds, False
    while time.monotonic() < until and not gone:
        gone = newcomer.is_gone()
        time.sleep(0.01)
    return gone


@pytest.mark.fault(
    "a rank ends while it waits to be let in",
    "its request is withdrawn",
)
def test_a_request_of_one_who_has_ended_is_withdrawn(links: Links) -> None:
    links.name, request = "run1", JoinRequest(1, 4)
    beacon = Beacon()
    place = beacon.light([HOST])
    assert place is not None
    write_beat(links, request, 1, place)
    newcomer = Newcomer(links, request, 1)
    assert not look(newcomer, 0.3), "it answers, though it writes no heartbeat"
    beacon.put_out(place)
    assert look(newcomer, 20.0)
    newcomer.close()


@pytest.mark.usefixtures("still")
def test_members_meet_a_newcomer_before_they_wait_for_it(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that has never answered, they could not tell that it ends in the exchange."""
    # Heartbeats: a busy machine is slow to answer.
    monkeypatch.setattr("offbeat.elastic.newcomer.MEET", 100)
    links.name, request, beacon = "run1", JoinRequest(1, 4), Beacon()
    place = beacon.light([HOST])
    assert place is not None
    write_beat(links, request, 1, place)
    admission = deaf(links)
    admission._acknowledge(request)
    assert Probe(place).is_known
    admission.close()
    beacon.put_out(place)


@pytest.mark.fault(
    "a rank ends after its request, before any member has reached it",
    "members wait for it for one heartbeat, and it may try again",
)
def test_members_do_not_wait_for_one_that_does_not_come(links: Links) -> None:
    request = JoinRequest(1, 4)
    assert let_in(links, request, 1, lambda: False) is None
    barrier = barrier_of(links.store, links.name, request.number)
    barrier.set("step", "7")
    assert not come(barrier, links, lambda: False), "the outcome is known to it, too"


def test_one_that_joins_comes_once_its_step_is_decided(links: Links) -> None:
    """All members watch it by then: one that ends before would be waited for in the exchange."""
    barrier, found = barrier_of(links.store, links.name, 4), list[bool]()
    thread = threading.Thread(target=lambda: found.append(come(barrier, links, lambda: False)))
    thread.start()
    time.sleep(0.2)
    assert barrier.add("come", 0) == 0
    barrier.set("step", "7")
    thread.join(20)
    assert found == [True]


@pytest.mark.parametrize("is_decided", [True, False])
@pytest.mark.usefixtures("still")
def test_a_decided_request_is_not_withdrawn(links: Links, is_decided: bool) -> None:
    """A member that has come to its step may wait for the others already, which all must come."""
    links.name, request, beacon = "run1", JoinRequest(1, 4), Beacon()
    place: Any = beacon.light([HOST])
    write_beat(links, request, 1, place)
    barrier = barrier_of(links.store, links.name, request.number)
    if not is_decided:
        barrier.add("acknowledged", 1)  # so that this member is not the last one
    admission = deaf(links)
    links.heartbeat.ask(None, request)
    admission._acknowledge(request)
    beacon.put_out(place)
    admission._newcomers[0]._probe.close()
    admission._newcomers[0]._probe = None  # another one asks at once, not after a heartbeat
    while barrier.find("outcome") is None:
        admission._withdraw_if_gone(links)
        time.sleep(0.01)
    assert links.heartbeat._ring.record.read().request == (request if is_decided else None)
    assert (barrier.find("step") == NEVER) != is_decided
    admission.close()


@pytest.mark.parametrize("beats", [True, False])
def test_a_refusal_counts_of_one_that_is_silent(links: Links, beats: bool) -> None:
    """It may not be reachable at its address: then it writes heartbeats."""
    links.name, request, beacon = "run1", JoinRequest(1, 4), Beacon()
    place: Any = beacon.light([HOST])
    beacon.put_out(place)
    newcomer, found = Newcomer(links, request, 1), []
    for number in range(10):
        write_beat(links, request, number if beats else 0, place)
        found.append(look(newcomer, heartbeat.BEAT))
    assert any(found) != beats
    newcomer.close()
