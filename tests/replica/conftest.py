"""Heartbeats for ranks that are threads, some of which go silent as if their process had died."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from offbeat.comm import heartbeat
from offbeat.comm.heartbeat import Heartbeat


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Impatient heartbeats, all of which end with the test."""
    for name, seconds in {"BEAT": 0.1, "BROKEN_AFTER": 1.0, "SILENT_AFTER": 1.5}.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    start, started = Heartbeat.__init__, []

    def remember(self: Heartbeat, *args: Any) -> None:
        start(self, *args)
        started.append(self)

    monkeypatch.setattr(Heartbeat, "__init__", remember)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
    for one in started:
        one.stop()
