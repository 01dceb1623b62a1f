"""What a heartbeat amounts to in a wait of another rank."""

import pytest

from offbeat.liveness.failure import PeerLost, Phase
from offbeat.liveness.heartbeats.diagnosis import Wait, find_fault
from offbeat.liveness.heartbeats.ring import Sign


@pytest.mark.parametrize(
    ("verb", "is_late", "is_fault"),
    [("", False, False), ("", True, True), ("step", False, True), ("step", True, True)],
)
def test_a_rank_that_left_is_a_fault_to_those_that_call(
    verb: str, is_late: bool, is_fault: bool
) -> None:
    """A rank in its own code may be about to leave too, though its exchange has failed already."""
    left = Sign(1, Phase(calls=4, verb="left"))
    fault = find_fault(left, Wait(0, Phase(calls=4, verb=verb), (), is_late))
    assert isinstance(fault, PeerLost) is is_fault
