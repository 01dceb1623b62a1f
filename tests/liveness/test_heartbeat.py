"""Waits end with an agreed error that is the same on all ranks."""

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore
from torch.optim import SGD

import offbeat
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.interrupt import interrupts
from offbeat.liveness.store.client import TimedStore
from offbeat.transport.world import World
from outcomes import errors_of
from problems import Quadratic, loss


@pytest.mark.parametrize("text", ["ddp", "local_sgd(every=1)", "sgp('ring')"])
@pytest.mark.fault(
    "one rank calls step(), others finish() or consensus()",
    "ValueError on all ranks; names both calls",
    group="Calls that differ between ranks",
)
def test_step_against_finish_is_an_error_on_all_ranks(text: str) -> None:
    def work(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(3 if world.rank == 2 else 4):
            loss(model, world.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        replica.finish()

    errors = errors_of(work, 3)
    assert all(isinstance(error, ValueError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "finish (call 3)" in str(errors[0])
    assert "step" in str(errors[0])


@pytest.mark.fault(
    "a rank leaves (detach) while the others train",
    "PeerLost on every other rank; names the rank and its calls",
)
def test_a_rank_that_leaves_early_is_named() -> None:
    def work(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.sgp(), mesh=world)
        for _ in range(3):
            if world.rank == 1:
                replica.detach()
                return
            replica.step()

    errors = errors_of(work, 2)
    assert errors[1] is None
    assert isinstance(errors[0], offbeat.PeerLost)
    assert "rank 1 has left (detach) after 0 calls" in str(errors[0])


@pytest.mark.fault("a rank computes for much longer than the others", "the others wait; no error")
def test_a_slow_rank_is_waited_for() -> None:
    """A rank that computes for long still beats: nobody may lose patience with it."""

    def work(world: World) -> None:
        model = Quadratic()
        replica = offbeat.replicate(model, offbeat.local_sgd(every=1), mesh=world)
        if world.rank == 0:
            time.sleep(4)  # longer than a beat, and than the first looks at the others
        replica.step()
        replica.detach()

    assert errors_of(work, 3) == [None, None, None]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heartbeat]:
    """The heartbeat of one of 8 ranks, whose thread does nothing for the time of a test."""
    monkeypatch.setattr(heartbeat, "BEAT", 60.0)
    timed = TimedStore(HashStore())
    beating = Heartbeat(timed, 0, tuple(range(8)))
    yield beating
    beating.stop()
    timed.close()


def test_a_timeout_before_any_group_is_open_is_explained(
    alone: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo on the wrong network interface: all ranks live, and no connection comes about."""
    monkeypatch.setattr(heartbeat, "SILENT_AFTER", -119.5)  # looks for 0.5 s
    with pytest.raises(offbeat.PeerLost, match="connectFullMesh"), alone.explaining():
        raise RuntimeError("Gloo connectFullMesh failed: Timed out")


def test_the_first_verdict_stands_when_the_store_is_lost_after_it(alone: Heartbeat) -> None:
    agreed = alone.report_error(ValueError("rank 3 is wrong"))
    alone._store.close()
    alone._tick()
    with pytest.raises(ValueError, match="rank 3 is wrong") as raised:
        alone.raise_agreed_error()
    assert raised.value is agreed


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own handler of SIGINT, also where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("reset", [False, True], ids=["alone", "after an event loop"])
def test_an_interrupt_right_after_a_wait_has_begun_is_heard(reset: bool, alone: Heartbeat) -> None:
    if reset:
        with asyncio.Runner() as runner:
            runner.get_loop().add_signal_handler(signal.SIGTERM, print)
        interrupts.open(alone)  # as another replica does
    alone._tick()
    with alone.watching():
        interrupt()
        alone._tick()
    assert "rank 0 was interrupted in" in str(alone._agreed)


@pytest.mark.usefixtures("default_handler")
def test_an_interrupt_that_the_script_has_handled_ends_no_wait(alone: Heartbeat) -> None:
    interrupt()
    with alone.watching():
        alone._tick()
    interrupt()
    alone._tick()
    with alone.watching():
        alone._tick()
    assert not alone.has_agreed_error
