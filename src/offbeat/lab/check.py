"""``offbeat lab --check``: what Gloo gets out of the emulated links, beside their rate."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import final

from rich.table import Table

from offbeat.lab import probe
from offbeat.lab.cluster import Cluster
from offbeat.lab.runner import Runner

PAYLOAD = 1448 / 1514  # of an Ethernet packet of TCP with time stamps: contents over all bytes
_SECONDS = 0.3  # of one transfer
_UNSHAPED = 2**26  # bytes where no rate says how many take that long


@final
@dataclass(frozen=True)
class Figures:
    """What was measured between nodes; Mbit/s are of the contents, without any headers.

    So the most that TCP can reach is 96 % of the line rate (``PAYLOAD``).
    A little more can be seen in short measurements, since a link lets 128 KiB pass at once.
    """

    nodes: int
    rate_mbit: float | None  # of every link, each way; None for no limit
    one_way_mbit: float  # from node 0 to node 1
    both_ways_mbit: float  # between nodes 0 and 1, each way
    all_reduce_mbit: float  # over all nodes: what each node sends, which is 2 (n-1)/n of the bytes
    round_trip_ms: float  # of one byte between nodes 0 and 1
    inside_node_mbit: float | None  # between ranks 0 and 1 where they share a node

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """All of it, for people."""
        limit = "no limit" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s each way"
        table = Table("measured", "", "of the rate", title=f"{self.nodes} nodes, {limit}")
        table.columns[1].justify = table.columns[2].justify = "right"
        rows = {
            "p2p, one way": self.one_way_mbit,
            "p2p, both ways at once, each": self.both_ways_mbit,
            "all-reduce, sent by each node": self.all_reduce_mbit,
        }
        for name, mbit in rows.items():
            share = "" if self.rate_mbit is None else f"{mbit / self.rate_mbit:.0%}"
            table.add_row(name, f"{mbit:,.0f} Mbit/s", share)
        if self.inside_node_mbit is not None:
            table.add_row("p2p inside node 0, no link", f"{self.inside_node_mbit:,.0f} Mbit/s", "")
        table.add_row("round trip", f"{self.round_trip_ms:.2f} ms", "")
        return table


def require(world: Cluster) -> None:
    """Raise ValueError for a world of one node, in which there is nothing to measure."""
    if world.nodes < 2:
        raise ValueError(f"check: got {world.nodes} node, expected 2 at least; for example 4")


def measure(place: Runner) -> Figures:
    """Measure in ``place``, which must have been entered; some seconds.

    Raises ValueError for a world of one node, RuntimeError with the ranks' output if one fails.
    """
    world = place.world
    require(world)
    size = _UNSHAPED if place.rate is None else round(place.rate / 8 * _SECONDS)
    size = max(1, round(size / probe.PIECE)) * probe.PIECE
    lines: list[tuple[int | None, str]] = []
    command = [sys.executable, probe.__file__, str(size), json.dumps(world.leaders)]
    code = place.run(command, on_line=lambda rank, line: lines.append((rank, line)))
    if code != 0:
        said = "\n".join(line for _, line in lines)
        raise RuntimeError(f"the check failed with exit code {code}; the ranks said:\n{said}")
    seconds = next(json.loads(line) for rank, line in lines if rank == 0 and line.startswith("{"))
    megabits = size * 8 / 1e6
    inside = seconds.get("inside_node")
    return Figures(
        nodes=world.nodes,
        rate_mbit=None if place.rate is None else place.rate / 1e6,
        one_way_mbit=megabits / seconds["one_way"],
        both_ways_mbit=megabits / seconds["both_ways"],
        all_reduce_mbit=megabits / seconds["all_reduce"] * 2 * (world.nodes - 1) / world.nodes,
        round_trip_ms=seconds["round_trip"] * 1e3,
        inside_node_mbit=None if inside is None else megabits / inside,
    )
