"""The result of ``offbeat lab --check``."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, final

from rich.table import Table

PAYLOAD = 1448 / 1514  # payload over size of an Ethernet frame, for TCP with time stamps
TOLERANCE = 0.05

_FORMATS = {
    "round trip": "{:,.1f} ms",
    "rate": "{:,.4g} Mbit/s",
    "loss": "{:.3g} %",
}


@final
@dataclass(frozen=True)
class PathMeasurement:
    """A quantity between nodes beside its wanted value, in ms, Mbit/s or per cent.

    ``error`` is the standard error of a measurement that counts packets, in the same unit.
    """

    path: str
    quantity: Literal["round trip", "rate", "loss"]
    wanted: float
    measured: float
    error: float = 0.0

    @property
    def is_met(self) -> bool:
        """Whether it is within 5 % of the wanted value, beside three standard errors."""
        return abs(self.measured - self.wanted) <= TOLERANCE * self.wanted + 3 * self.error

    def row(self) -> list[str]:
        """Return the cells of a table."""
        show = _FORMATS[self.quantity].format
        error = f" ± {self.error:.2g}" if self.quantity == "loss" else ""
        measured = show(self.measured).replace(" %", f"{error} %")
        deviation = f"{self.measured / self.wanted - 1:+.1%}" if self.wanted else ""
        note = "" if self.is_met else "not met"
        return [self.path, self.quantity, show(self.wanted), measured, deviation, note]


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
