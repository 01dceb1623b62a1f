"""A few ranks are watched by each: every fault is found, and false ones are not, in any world."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
from torch.distributed import HashStore

from offbeat.liveness.failure import PeerLost, Phase
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.beat import Beat
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.heartbeats.ring import Patience, WatchRing
from offbeat.liveness.store.client import TimedStore
from offbeat.liveness.store.ticker import Ticker, stretched

SIZE = 16


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT": 0.1, "SILENT_AFTER": 1.5, "BROKEN_AFTER": 0.7}.items():
        monkeypatch.setattr(heartbeat, name, seconds)


class Hearts:
    """The heartbeats of all ranks of a world, which wait in no exchange but say that they do."""

    def __init__(self, size: int, store: Any = None) -> None:
        self.timed = TimedStore(store or HashStore())
        self.all = [Heartbeat(self.timed, rank, tuple(range(size))) for rank in range(size)]
        self._waits = contextlib.ExitStack()

    def wait(self, ranks: Collection[int], verb: str = "step") -> None:
        """Let ``ranks`` wait from now on."""
        for rank in ranks:
            self._waits.enter_context(self.all[rank].verb(verb))
            self._waits.enter_context(self.all[rank].watching())

    def exchange(self, ranks: Collection[int], members: tuple[int, ...]) -> None:
        """Let ``ranks`` wait for ``members`` in a backward."""
        for rank in ranks:
            self._waits.enter_context(self.all[rank].backward(members))
            self._waits.enter_context(self.all[rank].watching())

    def agreed(self, ranks: Collection[int], within: float = 15.0) -> Exception:
        """Return the agreed error of ``ranks``, which is one."""
        until = time.monotonic() + within
        while not all(self.all[rank].has_agreed_error for rank in ranks):
            assert time.monotonic() < until, "no agreed error"
            time.sleep(0.02)
        found = {(type(e), str(e)) for e in (self.all[rank]._agreed for rank in ranks)}
        assert len(found) == 1
        kind, text = found.pop()
        return kind(text)

    def end(self) -> None:
        self._waits.close()
        for one in self.all:
            one.stop()
        self.timed.close()


@pytest.fixture
def hearts() -> Iterator[Hearts]:
    found = Hearts(SIZE)
    yield found
    found.end()


def freeze(one: Heartbeat, running: threading.Event) -> None:
    """Let its thread block, as that of a suspended process does, until it is ``running``."""
    beat = one._beat

    def late(stretch: float) -> None:
        running.wait(30)
        beat(stretch)

    one._beat = late  # type: ignore[method-assign]


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost", [[5], [5, 6, 7], [15, 0, 1], [*range(2, 10)]], ids=["one", "three", "wrapped", "half"]
)
@pytest.mark.parametrize("waiting", ["all", "one"])
@pytest.mark.fault(
    "one rank, neighbours or half of the world are lost at once",
    "PeerLost on all others; names one of them",
    group="Lost ranks and connections",
)
def test_losses_are_found_by_watchers_that_live(
    hearts: Hearts, lost: list[int], waiting: str
) -> None:
    """Whether the watchers of the lost rank wait too, or compute."""
    living = [rank for rank in range(SIZE) if rank not in lost]
    for rank in lost:
        hearts.all[rank]._end_thread()
    waits = living if waiting == "all" else [12]
    hearts.wait(waits)
    found = hearts.agreed(waits)
    assert isinstance(found, PeerLost)
    assert any(str(found).startswith(f"rank {rank} is lost: no sign of life") for rank in lost)
    assert "last heartbeat in its own code (call 0)" in str(found)


def test_a_rank_that_is_lost_later_has_a_watcher_left(hearts: Hearts) -> None:
    """Its three watchers were lost before, while nobody waited; the next living one takes over."""
    for rank in (5, 6, 7):
        hearts.all[rank]._end_thread()
    known = hearts.all[4]._ring.gone
    until = time.monotonic() + 20
    while known.keys() != {5, 6, 7}:
        assert time.monotonic() < until
        time.sleep(0.05)
    hearts.all[8]._end_thread()
    while known.get(8) != "lost":
        assert time.monotonic() < until
        time.sleep(0.05)
    (reported,) = hearts.all[12]._ring.gone.items()
    assert reported in {(rank, "lost") for rank in (5, 6, 7)}, "by the notice alone"


def test_survivors_look_for_other_losses_with_the_patience_of_a_failure(
    hearts: Hearts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no exchange has failed: the first loss was found by a watcher."""
    monkeypatch.setattr(heartbeat, "SILENT_AFTER", 1000.0)
    one, lost = hearts.all[4], (5, 6, 7, 8)
    one.report_error(PeerLost("rank 5 is lost"))
    for rank in lost:
        hearts.all[rank]._end_thread()
    until = time.monotonic() + 20
    while one.gone(lost) != dict.fromkeys(lost, "lost"):
        assert time.monotonic() < until, one.gone(lost)
        time.sleep(0.05)


@pytest.mark.fault(
    "a process is suspended while nobody waits for it",
    "no error",
    group="Lost ranks and connections",
)
def test_a_rank_that_returns_before_anybody_waits_is_no_longer_lost(hearts: Hearts) -> None:
    running = threading.Event()
    freeze(hearts.all[5], running)
    record = hearts.all[4]._ring.record
    until = time.monotonic() + 30
    while record.status.silent is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert record.status.silent.rank == 5
    running.set()
    while record.status.silent is not None:
        assert time.monotonic() < until
        time.sleep(0.05)
    hearts.wait(range(SIZE))
    time.sleep(1.0)
    assert not any(one.has_agreed_error for one in hearts.all)


def test_a_rank_that_is_frozen_while_others_wait_is_lost(hearts: Hearts) -> None:
    running = threading.Event()
    freeze(hearts.all[5], running)
    others = [rank for rank in range(SIZE) if rank != 5]
    hearts.wait(others, "finish")
    assert "rank 5 is lost" in str(hearts.agreed(others))
    running.set()


def test_a_connection_that_breaks_makes_all_watchers_less_patient(
    hearts: Hearts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_AFTER", 60.0)
    hearts.all[5]._end_thread()
    with pytest.raises(PeerLost, match="rank 5 is lost"), hearts.all[12].explaining():
        raise RuntimeError("Connection closed by peer")


# ---- leaving and different calls -----------------------------------------------------------------


def test_a_rank_that_has_left_is_found_from_afar(hearts: Hearts) -> None:
    hearts.all[9].stop()
    hearts.wait([1])
    assert "rank 9 has left (detach) after 0 calls, while rank 1 waits" in str(hearts.agreed([1]))


def test_ranks_that_leave_after_the_same_call_are_no_fault(hearts: Hearts) -> None:
    for one in hearts.all:
        one.next_call("finish")
    hearts.all[1].resume(Phase())  # it is still in that call
    for one in (hearts.all[0], *hearts.all[2:]):
        one.stop()
    hearts.wait([1], "finish")
    time.sleep(0.8)
    assert not hearts.all[1].has_agreed_error
    assert "has left (detach) after 1 calls" in str(hearts.agreed([1])), "too late for its call"


@pytest.mark.parametrize("first", [1, 9])
@pytest.mark.fault(
    "two distant ranks wait in different calls",
    "ValueError on all ranks that wait; names both calls",
    group="Calls that differ between ranks",
)
def test_different_calls_are_found_at_a_distance(hearts: Hearts, first: int) -> None:
    hearts.wait([first], "step")
    time.sleep(0.5)
    hearts.wait([10 - first], "load_state_dict")
    found = hearts.agreed([1, 9])
    assert isinstance(found, ValueError)
    assert f"rank {first} " in str(found)
    assert "is in step (call 0)" in str(found)
    assert "is in load_state_dict (call 0)" in str(found)


def test_a_rank_that_has_gone_on_is_found_at_a_distance(hearts: Hearts) -> None:
    """It has made another call than that which cannot be completed without the other rank."""
    hearts.all[9].next_call("step")
    hearts.wait([1], "finish")
    hearts.wait([9], "step")
    said = str(hearts.agreed([1]))
    assert "rank 9 has gone on to call 1, but rank 1 is in finish (call 0)" in said


def test_a_call_that_has_raised_on_all_ranks_leaves_no_trace(hearts: Hearts) -> None:
    """All ranks have waited in it, and go on with another one of the same number."""
    with contextlib.ExitStack() as waits:
        for one in hearts.all:
            waits.enter_context(one.verb("finish"))
            waits.enter_context(one.watching())
        time.sleep(0.6)
        assert hearts.all[0]._ring.record.read().front is not None
    time.sleep(0.3)
    hearts.wait(range(SIZE), "step")
    time.sleep(1.0)
    assert not any(one.has_agreed_error for one in hearts.all)


def test_a_member_that_has_passed_a_backward_is_found_in_its_group(hearts: Hearts) -> None:
    """The members are no neighbours in the world."""
    members = (0, 5, 10, 15)
    hearts.all[10].next_call("step")
    hearts.exchange([0, 5], members)
    found = hearts.agreed([0, 5])
    assert isinstance(found, ValueError)
    assert "rank 10 is in its own code (call 1), but rank 5 is in backward 1" in str(
        found
    ) or "rank 10 is in its own code (call 1), but rank 0 is in backward 1" in str(found)


def test_a_backward_that_met_another_one_is_named(hearts: Hearts) -> None:
    members = tuple(range(SIZE))
    for rank in range(8, SIZE):
        hearts.all[rank].next_call("step")
    with contextlib.ExitStack() as inside:
        for one in hearts.all:
            inside.enter_context(one.backward(members))
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=lambda one=one: errors.append(one.report_pairing()))
            for one in hearts.all
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len({str(error) for error in errors}) == 1
    assert len(errors) == SIZE
    assert "different numbers of backwards" in str(errors[0])


# ---- the store -----------------------------------------------------------------------------------


class CountingStore:
    """A store in memory that counts calls and the keys read."""

    def __init__(self) -> None:
        self.store, self.calls, self.keys = HashStore(), Counter[str](), 0

    def clone(self) -> "CountingStore":
        return self

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.calls["multi_get"] += 1
        self.keys += len(keys)
        return self.store.multi_get(keys)

    def __getattr__(self, name: str) -> object:
        self.calls[name] += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("size", [8, 64, 4096])
@pytest.mark.parametrize("waits", ["no", "step", "backward"])
def test_a_beat_takes_few_calls_of_the_store_in_every_world(
    size: int, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write and a read, or four; also beside ranks that left, are lost, or wait elsewhere."""
    store = CountingStore()
    timed = TimedStore(store)  # type: ignore[arg-type]
    monkeypatch.setattr(heartbeat, "BEAT", 1e-3)  # every wait is long enough for a look
    monkeypatch.setattr(TimedStore, "ticker", lambda *_: Ticker(1e6, "never"))
    one = Heartbeat(timed, 0, tuple(range(size)))
    beats = timed.under("heartbeat")
    for rank in range(1, size):
        there = Phase(calls=9, verb="left") if rank == size // 2 else Phase(calls=1)
        beats.set(f"rank{rank}", json.dumps(Beat(1, 1.0, there)))
        beats.append("ranks", f"{rank} ")
        beats.add("begun", 1)
    one._ring.record.change(lambda old: old._replace(front=size - 2, left=size // 2))
    one.next_call("step")
    one.next_call("step")
    with contextlib.ExitStack() as inside:
        if waits == "step":
            inside.enter_context(one.verb("finish"))
        if waits == "backward":
            inside.enter_context(one.backward(tuple(range(0, size, 2))))
        if waits != "no":
            inside.enter_context(one.watching())
            time.sleep(0.01)
        one._tick()
        one._tick()  # all ranks are known, and this one has come to the front
        store.calls.clear()
        store.keys = 0
        for tick in range(40):
            monkeypatch.setattr(one._writer, "_written", 0.0 if tick % 4 == 0 else 1e12)
            one._tick()
    found, keys = dict(store.calls), store.keys
    reads = 10 if waits == "no" else 40
    assert found == {"set": 10, "multi_get": reads}
    assert keys <= reads * 9
    assert not one.has_agreed_error
    one.stop()
    timed.close()


def test_a_start_of_many_ranks_reads_their_list_a_few_times() -> None:
    store = CountingStore()
    timed = TimedStore(store)  # type: ignore[arg-type]
    rings, patience = [], Patience(15.0, 5.0, 6.0, 1.0)
    for rank in range(100):
        timed.set(f"rank{rank}", json.dumps(Beat(1, 1.0, Phase())))
        rings.append(WatchRing(timed, rank, range(120)))
        rings[0].look((), patience)
    assert store.calls["get"] <= 8
    assert len(rings[0].begun) < 100
    rings[0].look((), patience)
    assert list(rings[0].begun) == [*range(100)], "all that are there, once no more come"
    timed.close()


class Pausing:
    """A store in memory that does not answer for some time."""

    def __init__(self) -> None:
        self.store, self.answering = HashStore(), threading.Event()
        self.answering.set()

    def clone(self) -> "Pausing":
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.answering.wait(30)
            return getattr(self.store, name)(*args)

        return call


@pytest.mark.fault(
    "the store answers late",
    "heartbeats slow down; no error",
    group="Lost ranks and connections",
)
def test_a_store_that_pauses_is_no_loss_of_ranks() -> None:
    store = Pausing()
    hearts = Hearts(6, store)
    hearts.wait(range(6))
    time.sleep(0.5)
    for _ in range(2):
        store.answering.clear()
        time.sleep(2.5)  # longer than a rank may be silent
        store.answering.set()
        time.sleep(0.3)
    assert not any(one.has_agreed_error for one in hearts.all)
    assert max(one._ticker.stretch for one in hearts.all) > 1
    hearts.all[2]._end_thread()
    others = [0, 1, 3, 4, 5]
    assert "rank 2 is lost" in str(hearts.agreed(others))
    hearts.end()


def test_a_watcher_that_was_suspended_condemns_nobody(hearts: Hearts) -> None:
    """It looks before the others, which were suspended with it, have written a heartbeat."""
    running = threading.Event()
    for one in hearts.all[1:]:
        freeze(one, running)
    hearts.wait(range(SIZE))
    time.sleep(0.4)
    watcher = hearts.all[0]._ring
    watcher._looked -= 3600.0
    time.sleep(0.4)
    assert not hearts.all[0].has_agreed_error
    running.set()


def test_the_pace_follows_what_a_beat_takes() -> None:
    stretch = 1.0
    for _ in range(20):
        stretch = stretched(stretch, 5.0)
    assert stretch == 10
    for _ in range(60):
        stretch = stretched(stretch, 0.1)
    assert stretch == 1


def test_a_rank_that_beats_slowly_is_given_more_time(hearts: Hearts) -> None:
    """Its process is slow, while the store and its watchers are not."""
    hearts.all[5]._ticker.stretch = 30.0
    hearts.all[5]._beat(30.0)
    hearts.all[5]._end_thread()  # silent from now on
    hearts.wait([4])
    time.sleep(3.0)
    assert not hearts.all[4].has_agreed_error
