"""The links of the lab, as they are measured, and what a plan is told of them."""

import os
from dataclasses import dataclass

from bench.harness import console
from bench.plan.cells import BURST, Layout
from offbeat.lab import Lab
from offbeat.lab.check import PAYLOAD, measure_links
from offbeat.plan import Fabric


@dataclass(frozen=True)
class Links:
    """What ``offbeat lab --check`` measures: Mbit/s of payload, and of one byte both ways."""

    mbit: float
    inside_mbit: float
    round_trip: float  # seconds
    cores: int = os.cpu_count() or 1  # of the machine that emulates all nodes

    @classmethod
    def measured(cls, rate: str) -> "Links":
        with Lab(2, 2, rate) as runner:
            links = measure_links(runner)
        console.print(f"{rate}: {links.both_ways_mbit:.1f} Mbit/s, {links.round_trip_ms:.2f} ms")
        inside = links.inside_node_mbit or links.both_ways_mbit
        return cls(links.both_ways_mbit, inside, links.round_trip_ms / 1e3)

    def share(self, layout: Layout) -> float:
        """By how much longer software takes where all ranks run it, on the cores of one machine."""
        return max(1.0, layout.nodes * layout.each / self.cores)

    def fabric(self, layout: Layout) -> Fabric:
        share = self.share(layout)  # nearly all of a round trip here is software
        return Fabric(
            nodes=layout.nodes,
            ranks_per_node=layout.each,
            rate=1e6 * self.mbit / PAYLOAD,
            latency=share * self.round_trip / 2,
            inside_rate=1e6 * self.inside_mbit,
            inside_latency=share * self.round_trip / 4,
            burst=BURST,
        )
