"""The network of a plan: links of nodes, and the time that messages take on them."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, NamedTuple, final

import numpy as np

from offbeat.lab.check import PAYLOAD
from offbeat.plan.sites import NO_LIMIT, Array, Nodes, Sites
from offbeat.plan.windows import FAR
from offbeat.settings import above, at_least, between, check_settings
from offbeat.transport.messages import SHARE
from offbeat.transport.world import Axis

MOST = 2**17  # ranks: all recipes then take 4 GB and minutes


class Path(NamedTuple):
    """The way of a message to another node: seconds of one way, and for each byte."""

    latency: float
    per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the time of a message."""
        return self.latency + self.per_byte * nbytes


@final
@dataclass(frozen=True, kw_only=True)
class Fabric:
    r"""Describes equal nodes behind one link each, and times messages between them.

    .. math:: t(m) = \alpha + \frac{m}{B}, \qquad B = \frac{rate}{8} \cdot \frac{1448}{1514}

    for a message of m bytes, with the headers of TCP, IP and Ethernet in full frames. All links
    reach a switch that does not block. A link carries ``rate`` in both directions at once, or
    with ``full_duplex=False`` in one at a time. All bytes that a node receives share its link,
    also from several senders (incast).

    Args:
        nodes: the number of nodes.
        ranks_per_node: ranks on each of them.
        rate: of a node's link, bit/s.
        latency: seconds of one way of a message beside its bytes, software included; with sites,
            inside of one.
        inside_rate: of a rank's link to the others of its node, bit/s in each direction.
        inside_latency: seconds of one message inside a node.
        full_duplex: whether links carry both directions at once.
        loss: the share of packets that is lost; with sites, between them.
        burst: bytes that a link passes above its rate after a pause.
        connections: how many two ranks of different nodes have, as in :func:`offbeat.replicate`.
        sites: of the nodes, and the links between them, if there are several.

    >>> Fabric(nodes=4, rate=8e6 / PAYLOAD, latency=1e-3).hop("world", 10_000)
    0.011
    """

    nodes: Annotated[int, at_least(1, "nodes")]
    ranks_per_node: Annotated[int, at_least(1, "ranks")] = 1
    rate: Annotated[float, above(0, "bit/s")]
    latency: Annotated[float, at_least(0, "seconds")] = 100e-6
    inside_rate: Annotated[float, above(0, "bit/s")] = 100e9
    inside_latency: Annotated[float, at_least(0, "seconds")] = 10e-6
    full_duplex: bool = True
    loss: Annotated[float, between(0, 0.5)] = 0.0
    burst: Annotated[int, at_least(0, "bytes")] = 0
    connections: Annotated[int, at_least(1, "connections")] = 1
    sites: Sites | None = None

    def __post_init__(self) -> None:
        """Check the settings, and that the exchanges of all ranks can be played."""
        check_settings(self)
        if self.ranks > MOST:
            raise ValueError(
                f"nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, expected at most "
                f"{MOST:,} ranks in all"
            )
        if self.sites is not None and sum(self.sites.nodes) != self.nodes:
            raise ValueError(
                f"nodes={self.nodes}, expected the {sum(self.sites.nodes)} of the sites "
                f"{self.sites.nodes} together"
            )

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        local = self.ranks_per_node
        return tuple(tuple(range(i, i + local)) for i in range(0, self.ranks, local))

    def size(self, axis: Axis) -> int:
        """Return the number of members of a group on ``axis``."""
        return {"world": self.ranks, "node": self.nodes, "local": self.ranks_per_node}[axis]

    def busy(self, out: float, into: float) -> float:
        """Return the seconds for which these bytes occupy the link of a node."""
        carried = max(out, into) if self.full_duplex else out + into
        return 8 * carried / (self.rate * PAYLOAD)

    def inside(self, nbytes: float) -> float:
        """Return the time of a message to another rank of the node, one each way."""
        carried = nbytes if self.full_duplex else 2 * nbytes
        return self.inside_latency + 8 * carried / self.inside_rate

    def path(self, axis: Axis, distance: int, together: int = 0) -> Path:
        """Return the slowest way if each member of a group sends to the one ``distance`` further.

        On "node" ``together`` local ranks share the link, all unless given. On "world" ranks are
        numbered node by node.
        """
        count = together or self.ranks_per_node
        if self.sites:
            latency, per_byte = _shift(self, axis, distance, count)
            return Path(float(latency.max()), float(per_byte.max()))
        if axis == "world":
            count = min(distance, self.ranks - distance, self.ranks_per_node)
        return Path(self.latency, self.busy(1, 1) * count)

    def around(self, axis: Axis, together: int) -> Path:
        """Return the sum of the ways of :meth:`path` over all distances."""
        return _around(self, axis, together)

    def hop(self, axis: Axis, nbytes: float) -> float:
        """Return the time of one message of each member of a group to the next one."""
        is_inside = axis == "local" or self.nodes == 1
        return self.inside(nbytes) if is_inside else self.path(axis, 1, 1).seconds(nbytes)

    def paths(self, source: Nodes, target: Nodes) -> tuple[Array, Array, Array]:
        """Return latencies and seconds for each byte of messages that nodes send at one time.

        And how many share the link that takes longest.
        """
        out, into = (np.bincount(nodes, minlength=self.nodes) for nodes in (source, target))
        counts = np.maximum(out[source], into[target])
        if not self.full_duplex:
            counts = out[source] + into[target]
        latency, per_byte = np.full(len(source), self.latency), self.busy(1, 0) * counts
        if self.sites:
            ways, slowest, shared = self.sites.between(source, target)
            counts = np.where(slowest > per_byte, shared, counts)
            latency, per_byte = latency + ways, np.maximum(per_byte, slowest)
        return latency, per_byte, counts

    def all_pairs(self, leaving: int) -> tuple[Path, float]:
        """Return the way of messages between all pairs at once, of which ``leaving`` leave a node.

        And how many share the busiest link: of two sites each sends one for every pair of nodes.
        """
        busiest = self.busy(1, 1) * leaving, leaving * (1.0 if self.full_duplex else 2.0)
        if self.sites:
            share = leaving / (self.nodes - 1)
            seconds, count = self.sites.of_all_pairs()
            busiest = max(busiest, (share * seconds, share * count))
        return Path(self.farthest, busiest[0]), busiest[1]

    def way(self, node: int, other: int) -> Path:
        """Return the way between two nodes that nobody else uses."""
        latency, per_byte, _ = self.paths(np.array([node]), np.array([other]))
        return Path(float(latency[0]), float(per_byte[0]))

    @cached_property
    def without_sites(self) -> "Fabric":
        """The same nodes on one site."""
        return replace(self, sites=None)

    @property
    def farthest(self) -> float:
        """The latency of the longest way."""
        return self.latency + (self.sites.latency if self.sites else 0.0)

    @property
    def spared(self) -> int:
        """Bytes of each round of messages that pass above the rate of a link.

        A far link rests while messages are on their way. A near one, which is always in use where
        it matters, passes no bursts.
        """
        return self.burst if self.farthest >= FAR else 0

    def beyond_burst(self, nbytes: float) -> float:
        """Return how many bytes of a large message pass at the rate of its link."""
        return max(0.0, nbytes - self.spared)

    def width(self, nbytes: float) -> int:
        """Return among how many connections a tensor is divided."""
        return self.connections if nbytes > SHARE * self.connections else 1

    def unlimited(self, *, at_once: bool) -> "Fabric":
        """Return the same network without limits of rates, and with ``at_once`` without latency."""
        sites = self.sites and self.sites.unlimited(at_once=at_once)
        near = (0.0, 0.0) if at_once else (self.latency, self.inside_latency)
        free = replace(self, rate=NO_LIMIT, inside_rate=NO_LIMIT, sites=sites)
        return replace(free, latency=near[0], inside_latency=near[1])

    def leaving(self, axis: Axis) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return how many messages leave a node when each rank sends one over each distance.

        For the distances 1, 2, ..., n-1 of members of a group on ``axis``.
        """
        size, local = self.size(axis), self.ranks_per_node
        distances = np.arange(1, size)
        if axis == "local":
            return np.zeros_like(distances)
        if axis == "node":
            return np.full_like(distances, local)
        return np.minimum(np.minimum(distances, size - distances), local)


@lru_cache(maxsize=2**10)  # of hundreds of nodes each
def _shift(fabric: Fabric, axis: Axis, distance: int, together: int) -> tuple[Array, Array]:
    """Return the ways from each member of a group to the one ``distance`` further."""
    many, local = (together, 1) if axis == "node" else (1, fabric.ranks_per_node)
    members = np.arange(fabric.nodes * local)
    source, target = members // local, np.roll(members, -distance) // local
    latency = np.full(len(members), fabric.inside_latency)
    per_byte = np.full(len(members), fabric.inside(1) - fabric.inside(0))
    far = source != target
    latency[far], per_byte[far], _ = fabric.paths(source[far], target[far])
    return latency, np.where(far, many * per_byte, per_byte)


@lru_cache(maxsize=2**4)
def _around(fabric: Fabric, axis: Axis, together: int) -> Path:
    ways = [fabric.path(axis, distance, together) for distance in range(1, fabric.size(axis))]
    return Path(sum(way.latency for way in ways), sum(way.per_byte for way in ways))
