"""What holds for all tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from offbeat.replica.replica import Replica

# Imported by the server of forked processes only; not searched for doctests.
collect_ignore = ["preloaded.py"]


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


@pytest.fixture(params=["alike", "unlike"])
def machine_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are the same on all ranks, or that some ranks lack."""
    if request.param == "unlike":
        found = iter(["", "numba 1", "numba 2"] * 9)
        monkeypatch.setattr("offbeat.parameters.adasum.operands.machine_code", lambda: next(found))
