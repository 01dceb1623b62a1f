"""The context that replaces errors of torch."""

import gc
import weakref

import pytest

from offbeat.liveness.error_context import ErrorContext
from offbeat.liveness.failure import NoHeartbeat, PeerLost


class Socket:
    """What a frame holds."""


def test_an_error_that_is_dropped_frees_what_its_frames_held() -> None:
    detector = NoHeartbeat(0, (0, 1))

    def fail() -> weakref.ref[Socket]:
        held = Socket()
        found = weakref.ref(held)
        with pytest.raises(PeerLost, match="failed"), detector.explaining():
            raise RuntimeError("the connection is closed")
        return found

    gc.disable()  # process groups must close at once, not when the collector runs
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_begins_and_ends_and_passes_on_what_it_does_not_explain() -> None:
    calls: list[str] = []
    lost = PeerLost("rank 1 is lost")

    def explain(error: RuntimeError) -> Exception:
        calls.append(str(error))
        return error

    context = ErrorContext(explain, lambda: calls.append("begin"), lambda: calls.append("end"))
    with pytest.raises(PeerLost) as raised, context:
        raise lost
    assert raised.value is lost
    assert raised.value.__cause__ is None
    with pytest.raises(KeyError), context:
        raise KeyError("no error of torch")
    assert calls == ["begin", "rank 1 is lost", "end", "begin", "end"]
