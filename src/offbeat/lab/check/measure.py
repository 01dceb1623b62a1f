"""``offbeat lab --check``: the throughput of Gloo over the links, and what they do to packets."""

import json
import math
from dataclasses import asdict, dataclass
from typing import final

from rich.table import Table

from offbeat.lab.check import gloo_probe
from offbeat.lab.check.paths import PathMeasurement, measure_paths, run_probe
from offbeat.lab.cluster import Cluster
from offbeat.lab.network.links import Links
from offbeat.lab.runner import Runner

PAYLOAD = 1448 / 1514  # payload over size of an Ethernet frame, for TCP with time stamps
_SECONDS = 0.3  # duration of one transfer
_UNLIMITED_SIZE = 2**26  # bytes of one transfer where there is no rate
_TRIPS = 8  # round trips that a transfer takes at least, until TCP has reached the rate


def require_two_nodes(cluster: Cluster) -> None:
    """Raise ValueError for a cluster of one node, which has no links to measure."""
    if cluster.nodes < 2:
        raise ValueError(f"check: got {cluster.nodes} node, expected at least 2; for example 4")


@final
@dataclass(frozen=True)
class LinkMeasurements:
    """The throughput and latency between nodes. Mbit/s count payload, without headers.

    TCP reaches at most 96 % of the line rate (``PAYLOAD``). Short measurements can exceed that
    slightly, since a link lets 128 KiB pass above its rate. ``paths`` hold what was wanted beside
    what was measured, in Mbit/s with headers: of unequal or far links only. Nodes 0 and 1 stand
    for the first nodes of the first two sites if there are sites.
    """

    nodes: int
    rate_mbit: float | None  # from node 0 to node 1; None for no limit
    one_way_mbit: float  # from node 0 to node 1
    both_ways_mbit: float  # between nodes 0 and 1, in each direction
    all_reduce_mbit: float  # over all nodes; each node sends 2 (n-1)/n of the bytes
    round_trip_ms: float  # one byte between nodes 0 and 1
    inside_node_mbit: float | None  # between ranks 0 and 1 if they share a node
    paths: tuple[PathMeasurement, ...] = ()
    delay_line_cores: float | None = None  # in use while the paths were measured

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

    def paths_table(self) -> Table:
        """Return a table of the wanted and measured values."""
        notes = []
        if self.delay_line_cores is not None:
            notes.append(f"delay line: {100 * self.delay_line_cores:.0f} % of a core")
        if not all(path.is_met for path in self.paths):
            notes.append(
                "not met: this machine is too slow for these links; choose lower rates, no loss or "
                "fewer nodes"
            )
        heads = ("path", "quantity", "wanted", "measured", "deviation", "")
        table = Table(*heads, title="packets on the links", caption="; ".join(notes) or None)
        for column in table.columns[2:5]:
            column.justify = "right"
        for path in self.paths:
            table.add_row(*path.row())
        return table


def measure_links(runner: Runner) -> LinkMeasurements:
    """Measure the links of ``runner``, which must have been entered.

    Takes a few seconds, or with latency half a minute. Raises ValueError for a cluster of one
    node, and RuntimeError with the output of the ranks if a rank fails.
    """
    cluster, links = runner.cluster, runner.links
    require_two_nodes(cluster)
    before = runner.delay_line_usage()
    paths = measure_paths(runner) if links.delays or links.up.rate != links.down.rate else []
    after = runner.delay_line_usage()
    first = [links.nodes_of(site)[0] for site in range(len(links.sites))]
    order = [*first, *(node for node in range(cluster.nodes) if node not in first)]
    leaders = [cluster.leaders[node] for node in order]
    limits = [wire.rate for wire in links.wires_between(*order[:2]) if wire.rate is not None]
    rate = min(limits, default=None)
    size, *times = _effort(links, rate)
    (seconds,) = run_probe(
        runner, [gloo_probe.__file__, *map(str, (size, *times)), json.dumps(leaders)]
    )
    megabits = size * 8 / 1e6
    inside = seconds.get("inside_node")
    return LinkMeasurements(
        nodes=cluster.nodes,
        rate_mbit=None if rate is None else rate / 1e6,
        one_way_mbit=megabits / seconds["one_way"],
        both_ways_mbit=megabits / seconds["both_ways"],
        all_reduce_mbit=megabits / seconds["all_reduce"] * 2 * (cluster.nodes - 1) / cluster.nodes,
        round_trip_ms=seconds["round_trip"] * 1e3,
        inside_node_mbit=None if inside is None else megabits / inside,
        paths=tuple(paths),
        delay_line_cores=None if before is None or after is None else after.since(before).cores,
    )


def _effort(links: Links, rate: float | None) -> tuple[int, int, int]:
    """Return the bytes of one transfer, how often, and the round trips: at most half a minute."""
    seconds = max(_SECONDS, _TRIPS * links.round_trip)
    rate = min(rate or math.inf, _lossy_rate(links))
    size = _UNLIMITED_SIZE if rate == math.inf else round(rate / 8 * seconds)
    size = max(1, round(size / gloo_probe.PIECE)) * gloo_probe.PIECE
    return (size, 1, 20) if links.delays else (size, 3, 50)


def _lossy_rate(links: Links) -> float:
    r"""Return about what one TCP connection carries with random loss, bit/s.

    .. math:: \frac{MSS}{RTT} \sqrt{\frac{3}{2 p}}

    (Mathis et al. 1997), for the probability of loss p.
    """
    loss = max(wire.loss for wire in links.wires)
    return 8 * 1448 / links.round_trip * math.sqrt(1.5 / loss) if loss else math.inf
