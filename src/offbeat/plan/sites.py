"""Sites of a plan: nodes that are near each other, and the links that sites share."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from offbeat.lab.check import PAYLOAD
from offbeat.lab.network.links import Links, Pair
from offbeat.lab.network.wire import Wire

NO_LIMIT = 10**18  # bit/s
Nodes = NDArray[np.int64]
Array = NDArray[np.float64]


@final
@dataclass(frozen=True)
class Sites:
    """The nodes of each site, numbered site by site, and the link of every pair of sites.

    >>> two = Sites.of(Links.parse(sites=(1, 2), between=["60ms@100mbit"]))
    >>> latency, per_byte, _ = two.between(np.array([0, 0, 1]), np.array([1, 2, 2]))
    >>> latency, (per_byte[0] / two.between(np.array([0]), np.array([1]))[1]).round(3)
    (array([0.06, 0.06, 0.  ]), array([2.]))
    """

    nodes: tuple[int, ...]
    links: tuple[tuple[Pair, Wire], ...]

    @classmethod
    def of(cls, links: Links) -> "Sites | None":
        """Return those of the options of a lab; None without sites."""
        return cls(links.sites, tuple(links.far.items())) if links.sites else None

    def __str__(self) -> str:
        kinds = dict.fromkeys(str(wire) for _, wire in self.links)
        return f"{', '.join(map(str, self.nodes))} nodes, {'; '.join(kinds)}"

    def between(self, source: Nodes, target: Nodes) -> tuple[Array, Array, Array]:
        """Return latencies and seconds for each byte of messages of nodes at the same time.

        And how many share the link between two sites.
        """
        ways, rates = self._tables
        pair = self.pair(source, target)
        shared: Array = np.bincount(pair)[pair].astype(np.float64)
        return ways[pair], 8 / PAYLOAD / rates[pair] * shared, shared

    def pair(self, source: Nodes, target: Nodes) -> Nodes:
        """Return the number of the link between the sites of nodes, in its direction."""
        found: Nodes = self._site[source] * len(self.nodes) + self._site[target]
        return found

    def of_all_pairs(self) -> tuple[float, int]:
        """Return the seconds for each byte of messages from every node to every other.

        And how many of them share the link that takes longest.
        """
        counts = ((self.nodes[a] * self.nodes[b], wire.rate) for (a, b), wire in self.links)
        return max((8 / PAYLOAD / (rate or NO_LIMIT) * count, count) for count, rate in counts)

    @property
    def latency(self) -> float:
        """The latency of the longest link."""
        return max(wire.latency for _, wire in self.links)

    def unlimited(self, *, at_once: bool) -> "Sites":
        """Return the same without limits of rates, and with ``at_once`` without latency."""
        free = Wire(NO_LIMIT)
        return Sites(
            self.nodes,
            tuple((p, free if at_once else replace(w, rate=NO_LIMIT)) for p, w in self.links),
        )

    @cached_property
    def _site(self) -> Nodes:
        return np.repeat(np.arange(len(self.nodes)), self.nodes)

    @cached_property
    def _tables(self) -> tuple[Array, Array]:
        """The latency and the rate between all pairs of sites."""
        shape = (len(self.nodes), len(self.nodes))
        ways, rates = np.zeros(shape), np.full(shape, float(NO_LIMIT))
        for (a, b), wire in self.links:
            ways[a, b] = ways[b, a] = wire.latency
            rates[a, b] = rates[b, a] = wire.rate or NO_LIMIT
        return ways.ravel(), rates.ravel()
