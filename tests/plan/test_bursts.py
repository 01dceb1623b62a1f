"""Links that let a burst pass above their rate after a rest, as those of tc tbf do."""

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
