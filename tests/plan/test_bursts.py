"""Links that let a burst pass above their rate after a rest, as those of tc tbf do."""

import numpy as np
import pytest
from clusters import profile

from offbeat.lab.check import PAYLOAD
from offbeat.plan import Fabric
from offbeat.plan.clocks import Clocks

MEGABYTE = 8e6 / PAYLOAD  # a second, of payload, in bit/s


@pytest.mark.parametrize("kind", ["at_once", "staged", "ring"])
def test_what_exceeds_a_burst_waits_and_so_does_what_follows_soon(kind: str) -> None:
    fabric = Fabric(nodes=3, rate=MEGABYTE, latency=0.0, burst=100_000)
    clocks = Clocks(fabric, profile())

    def exchange(nbytes: int) -> float:
        """Bytes to each of two others."""
        rest = (1,) if kind == "ring" else ()
        began = clocks.now.max()
        clocks.wait(getattr(clocks, kind)(clocks.now, nbytes, "node", *rest))
        return float(clocks.now.max() - began)

    assert exchange(30_000) == pytest.approx(0.0, abs=1e-9)
    assert exchange(30_000) == pytest.approx(0.02)
    clocks.spend(0.06)
    assert exchange(35_000) == pytest.approx(0.01)
    clocks.spend(9.0)
    assert exchange(80_000) == pytest.approx(0.06)


def test_ranks_wait_for_those_of_their_own_group() -> None:
    """Of the times of two nodes of three ranks: mates share a node, counterparts a place in it."""
    clocks = Clocks(Fabric(nodes=2, ranks_per_node=3, rate=1e9, latency=0.0), profile())
    times = np.array([[1.0, 2.0, 3.0], [6.0, 5.0, 4.0]])
    for axis, latest in (("local", [[3], [6]]), ("node", [[6, 5, 4]]), ("world", [[6]])):
        found = np.broadcast_to(clocks.last(times, axis), times.shape)
        np.testing.assert_array_equal(found, np.broadcast_to(latest, times.shape))
