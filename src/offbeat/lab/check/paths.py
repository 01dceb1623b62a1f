"""The measurement of round trips, rates and loss between nodes, packet by packet."""

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from offbeat.lab.check import path_probe
from offbeat.lab.network.wire import Wire
from offbeat.lab.runner import Runner

TOLERANCE = 0.05

_FORMATS = {
    "round trip": "{:,.1f} ms",
    "rate": "{:,.4g} Mbit/s",
    "loss": "{:.3g} %",
}
_FRAME = 1514  # bytes of a full packet on the wire
_SMALL = 60  # of one whose loss is counted
_PACED = 10_000  # packets per second, or a third of the rate
_SECONDS = {"rate": 1.5, "loss": 3.0, "echo": 0.6}
_MARGIN = 0.5  # seconds that the last packet may be later than a round trip
_MOST_PEERS = 8  # that send to one node, or receive from it

_RUNS = itertools.count()
Nodes = Sequence[tuple[int, int]]  # (sender, receiver) of flows


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


def measure_paths(runner: Runner) -> list[PathMeasurement]:
    """Measure what the links of ``runner`` do to packets, in 10 s, or 10 s for a pair of sites."""
    links = runner.links
    found: list[PathMeasurement] = []
    if not links.sites:
        others = range(1, min(runner.cluster.nodes, _MOST_PEERS + 1))
        found += _delays(runner, "node 0 to 1", [(0, 1)], links.down)
        up, down = links.up.rate or math.inf, links.down.rate or math.inf
        out, into = [(0, node) for node in others], [(node, 0) for node in others]
        found += _rate(runner, "out of node 0", out, min(up, down * len(others)))
        found += _rate(runner, "into node 0", into, min(down, up * len(others)))
    for (one, other), wire in links.far.items():
        name = f"site {one} to {other}"
        first, second = links.nodes_of(one), links.nodes_of(other)
        found += _delays(runner, name, [(first[0], second[0])], wire)
        near = min(links.up.rate or math.inf, links.down.rate or math.inf)
        for where, pairs in (
            (name, list(zip(first, second, strict=False))[:_MOST_PEERS]),
            (f"site {other} to {one}", list(zip(second, first, strict=False))[:_MOST_PEERS]),
        ):
            found += _rate(runner, where, pairs, min(wire.rate or math.inf, near * len(pairs)))
    return found


def _delays(runner: Runner, name: str, nodes: Nodes, wire: Wire) -> list[PathMeasurement]:
    """Measure the round trip if there is a latency, and the loss if there is one."""
    found = []
    if wire.latency:
        (trip,) = _run(runner, nodes, "echo", packets=100, size=_SMALL)
        error = 1e3 * wire.jitter * math.sqrt(max(0.01, 4 * wire.jitter) / _SECONDS["echo"])
        milliseconds = 1e3 * trip["round_trip"]
        wanted = 2e3 * wire.latency
        found.append(PathMeasurement(name, "round trip", wanted, milliseconds, error))
    if wire.loss:
        slowest = min(runner.links.up.rate or math.inf, wire.rate or math.inf)
        pace = round(min(_PACED, slowest / 3 / 8 / _SMALL))
        (flow,) = _run(runner, nodes, "loss", packets=pace, size=_SMALL)
        lost = 1 - flow["received"] / flow["sent"]
        error = math.sqrt(wire.loss * (1 - wire.loss) / flow["sent"])
        found.append(PathMeasurement(name, "loss", 100 * wire.loss, 100 * lost, 100 * error))
    return found


def _rate(runner: Runner, name: str, nodes: Nodes, wanted: float) -> list[PathMeasurement]:
    """Measure the rate of all flows together if there is a limit."""
    if wanted == math.inf or runner.links.encrypt:  # whose packets are smaller
        return []
    flows = _run(runner, nodes, "rate", packets=0, size=_FRAME)
    packet = len(nodes) * _FRAME * 8e-6 / (_SECONDS["rate"] - path_probe.SETTLE)
    # The bucket has let those pass too that were lost.
    arrived = 1 - max(wire.loss for wire in runner.links.wires)
    measured = sum(flow["mbit"] for flow in flows) / arrived
    return [PathMeasurement(name, "rate", wanted / 1e6, measured, packet)]


def _run(
    runner: Runner, nodes: Nodes, kind: str, packets: int, size: int
) -> list[dict[str, float]]:
    """Run one flow for each pair of nodes, all at once; return their results."""
    leaders = runner.cluster.leaders
    shared = {"kind": kind, "seconds": _SECONDS[kind], "packets": packets, "bytes": size}
    shared |= {"wait": runner.links.round_trip + _MARGIN, "run": next(_RUNS)}
    flows: list[dict[str, Any]] = [
        {**shared, "sender": leaders[a], "receiver": leaders[b], "to": f"node{b}"} for a, b in nodes
    ]
    found: list[dict[str, float]] = [{} for _ in flows]
    for line in run_probe(runner, ["-I", "-S", path_probe.__file__, json.dumps(flows)]):
        found[int(line["flow"])] |= line  # both ends of a flow print
    return found


def run_probe(runner: Runner, arguments: list[str]) -> list[dict[str, float]]:
    """Run a script on all ranks; return the objects that they print, a line of JSON each."""
    lines: list[str] = []
    command = [sys.executable, *arguments]
    code = runner.run(command, on_line=lambda rank, line: lines.append(line))
    if code != 0:
        output = "\n".join(lines)
        raise RuntimeError(
            f"the check failed with exit code {code}; output of the ranks:\n{output}"
        )
    return [json.loads(line) for line in lines if line.startswith("{")]
