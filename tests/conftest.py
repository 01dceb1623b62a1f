"""What holds for all tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from offbeat.replica import Replica


@pytest.fixture(autouse=True)
def detached_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Detach what a test has left attached: its threads would go on beating, its sockets add up."""
    attach, attached = Replica.__init__, []

    def remember(self: Replica, *args: Any) -> None:
        attach(self, *args)
        attached.append(self)

    monkeypatch.setattr(Replica, "__init__", remember)
    yield
    for replica in attached:
        replica.detach()
