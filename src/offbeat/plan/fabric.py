"""The network of a plan: links of nodes, and the time that messages take on them."""

from dataclasses import dataclass
from typing import Annotated, final

import numpy as np

from offbeat.kit import quantity
from offbeat.lab.check import PAYLOAD
from offbeat.settings import above, at_least, check_settings
from offbeat.transport.world import Axis

MOST = 2**17  # ranks: all recipes then take 4 GB and minutes


def parse_latency(text: str) -> float:
    """Parse a time such as "100us" or "0.5ms" into seconds.

    >>> parse_latency("100us")
    0.0001
    """
    expected = "a number with ns, us, ms or s; for example 100us"
    return quantity.parse(text, "latency", quantity.TIME_UNITS, expected)


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
        latency: seconds of one message beside its bytes, software included.
        inside_rate: of a rank's link to the others of its node, bit/s in each direction.
        inside_latency: seconds of one message inside a node.
        full_duplex: whether links carry both directions at once.

    >>> Fabric(nodes=4, rate=8e6 / PAYLOAD, latency=1e-3).seconds(10_000)
    0.011
    """

    nodes: Annotated[int, at_least(1, "nodes")]
    ranks_per_node: Annotated[int, at_least(1, "ranks")] = 1
    rate: Annotated[float, above(0, "bit/s")]
    latency: Annotated[float, at_least(0, "seconds")] = 100e-6
    inside_rate: Annotated[float, above(0, "bit/s")] = 100e9
    inside_latency: Annotated[float, at_least(0, "seconds")] = 10e-6
    full_duplex: bool = True

    def __post_init__(self) -> None:
        """Check the settings, and that the exchanges of all ranks can be played."""
        check_settings(self)
        if self.ranks > MOST:
            raise ValueError(
                f"nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, expected at most "
                f"{MOST:,} ranks in all"
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

    def seconds(self, out: float, into: float | None = None) -> float:
        """Return the time of a message between nodes: ``out`` leaves while ``into`` arrives.

        ``into`` is as much as ``out`` unless given.
        """
        return self.latency + self.busy(out, out if into is None else into)

    def busy(self, out: float, into: float) -> float:
        """Return the seconds for which these bytes occupy the link of a node."""
        carried = max(out, into) if self.full_duplex else out + into
        return 8 * carried / (self.rate * PAYLOAD)

    def inside(self, nbytes: float) -> float:
        """Return the time of a message to another rank of the node, one each way."""
        carried = nbytes if self.full_duplex else 2 * nbytes
        return self.inside_latency + 8 * carried / self.inside_rate

    def hop(self, axis: Axis, nbytes: float, together: int) -> float:
        """Return the time of one hop of a ring: everybody sends ``nbytes`` to the next one.

        On "node" the rings of ``together`` local ranks share the link. On "world" ranks are
        numbered node by node, so that one rank of each node sends to the next node.
        """
        if axis == "local" or self.nodes == 1:
            return self.inside(nbytes)
        many = together if axis == "node" else 1
        between = self.seconds(many * nbytes)
        inner = axis == "world" and self.ranks_per_node > 1
        return max(between, self.inside(nbytes)) if inner else between

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
