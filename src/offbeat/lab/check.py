"""``offbeat lab --check``: the throughput of Gloo over the emulated links."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import final

from rich.table import Table

from offbeat.lab import probe
from offbeat.lab.cluster import Cluster
from offbeat.lab.runner import Runner

PAYLOAD = 1448 / 1514  # payload over size of an Ethernet frame, for TCP with time stamps
_SECONDS = 0.3  # duration of one transfer
_UNLIMITED_SIZE = 2**26  # bytes of one transfer where there is no rate


@final
@dataclass(frozen=True)
class LinkMeasurements:
    """The throughput and latency between nodes. Mbit/s count payload, without headers.

    TCP reaches at most 96 % of the line rate (``PAYLOAD``). Short measurements can exceed that
    slightly, since a link lets 128 KiB pass above its rate.
    """

    nodes: int
    rate_mbit: float | None  # of every link in each direction; None for no limit
    one_way_mbit: float  # from node 0 to node 1
    both_ways_mbit: float  # between nodes 0 and 1, in each direction
    all_reduce_mbit: float  # over all nodes; each node sends 2 (n-1)/n of the bytes
    round_trip_ms: float  # one byte between nodes 0 and 1
    inside_node_mbit: float | None  # between ranks 0 and 1 if they share a node

    def to_json(self) -> str:
        """Return all fields as JSON text."""
        return json.dumps(asdict(self), indent=2)

    def table(self) -> Table:
        """Return a table, with the share of the rate that each pattern reaches."""
        limit = (
            "no limit" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s in each direction"
        )
        table = Table("pattern", "measured", "of the rate", title=f"{self.nodes} nodes, {limit}")
        table.columns[1].justify = table.columns[2].justify = "right"
        rows = {
            "p2p, one way": self.one_way_mbit,
            "p2p, both ways, in each direction": self.both_ways_mbit,
            "all-reduce, sent by each node": self.all_reduce_mbit,
        }
        for name, mbit in rows.items():
            share = "" if self.rate_mbit is None else f"{mbit / self.rate_mbit:.0%}"
            table.add_row(name, f"{mbit:,.0f} Mbit/s", share)
        if self.inside_node_mbit is not None:
            table.add_row("p2p inside node 0 (no link)", f"{self.inside_node_mbit:,.0f} Mbit/s", "")
        table.add_row("round trip", f"{self.round_trip_ms:.2f} ms", "")
        return table


def require_two_nodes(cluster: Cluster) -> None:
    """Raise ValueError for a cluster of one node, which has no links to measure."""
    if cluster.nodes < 2:
        raise ValueError(f"check: got {cluster.nodes} node, expected at least 2; for example 4")


def measure_links(runner: Runner) -> LinkMeasurements:
    """Measure the links of ``runner``, which must have been entered, in a few seconds.

    Raises ValueError for a cluster of one node, and RuntimeError with the output of the ranks if
    a rank fails.
    """
    cluster = runner.cluster
    require_two_nodes(cluster)
    size = _UNLIMITED_SIZE if runner.rate is None else round(runner.rate / 8 * _SECONDS)
    size = max(1, round(size / probe.PIECE)) * probe.PIECE
    lines: list[tuple[int | None, str]] = []
    command = [sys.executable, probe.__file__, str(size), json.dumps(cluster.leaders)]
    code = runner.run(command, on_line=lambda rank, line: lines.append((rank, line)))
    if code != 0:
        output = "\n".join(line for _, line in lines)
        raise RuntimeError(
            f"the check failed with exit code {code}; output of the ranks:\n{output}"
        )
    seconds = next(json.loads(line) for rank, line in lines if rank == 0 and line.startswith("{"))
    megabits = size * 8 / 1e6
    inside = seconds.get("inside_node")
    return LinkMeasurements(
        nodes=cluster.nodes,
        rate_mbit=None if runner.rate is None else runner.rate / 1e6,
        one_way_mbit=megabits / seconds["one_way"],
        both_ways_mbit=megabits / seconds["both_ways"],
        all_reduce_mbit=megabits / seconds["all_reduce"] * 2 * (cluster.nodes - 1) / cluster.nodes,
        round_trip_ms=seconds["round_trip"] * 1e3,
        inside_node_mbit=None if inside is None else megabits / inside,
    )
