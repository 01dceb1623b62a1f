"""The clocks of all ranks, what they have sent, and the collectives that join them."""

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from offbeat.plan.fabric import Fabric
from offbeat.plan.profile import Profile
from offbeat.plan.speeds import Speeds
from offbeat.transport.world import Axis

Array = NDArray[np.float64]


@final
@dataclass(eq=False)
class Clocks:
    """Holds the time of every rank's training thread, in arrays (nodes, ranks per node).

    A collective joins the members of a group: it begins when the last of them has come and the
    group's last collective has ended. Its hops, rounds of max-plus algebra in which everybody
    waits for a neighbour, end at the same time on all members after one turn.

    Attributes:
        fabric: the network.
        profile: the times of a step.
        now: the time of every rank.
        began: the time of every rank from which steps count.
        pace: by how much longer each rank computes in this step.
        busy: when the last collective on each axis has ended.
        sent: bytes that ranks have sent, by axis, as ``replica.stats()`` counts them.
        crossed: bytes that have left each node (nodes,).
    """

    fabric: Fabric
    profile: Profile
    now: Array = field(init=False)
    began: Array = field(init=False)
    pace: Array = field(init=False)
    busy: dict[Axis, Array] = field(init=False)
    sent: dict[Axis, Array] = field(init=False, default_factory=dict)
    crossed: Array = field(init=False)

    def __post_init__(self) -> None:
        """Start all clocks at zero."""
        shape = self.fabric.nodes, self.fabric.ranks_per_node
        self.now, self.pace = np.zeros(shape), np.ones(shape)
        self.began = self.now
        self.busy = {axis: np.zeros(shape) for axis in ("world", "node", "local")}
        self.crossed = np.zeros(self.fabric.nodes)

    @property
    def speeds(self) -> Speeds:
        """The speeds of passes over memory."""
        return self.profile.speeds

    def begin(self) -> None:
        """Count time and bytes from now on."""
        self.began = self.now
        self.sent.clear()
        self.crossed = np.zeros(self.fabric.nodes)

    def spend(self, seconds: float) -> None:
        """Let every rank compute, as long as its pace makes of ``seconds``."""
        self.now = self.now + seconds * self.pace

    def wait(self, arrival: Array) -> None:
        """Let every rank wait until its ``arrival``."""
        self.now = np.maximum(self.now, arrival)

    def last(self, times: Array, axis: Axis) -> Array:
        """Return the latest of the ``times`` in every group, for each of its members."""
        over = {"world": (0, 1), "node": (0,), "local": (1,)}[axis]
        found: Array = np.broadcast_to(times.max(axis=over, keepdims=True), times.shape)
        return found

    def count(self, axis: Axis, nbytes: "float | Array") -> None:
        """Count bytes that every rank, or each one its own, has sent."""
        before = self.sent.get(axis)
        self.sent[axis] = (np.zeros(self.now.shape) if before is None else before) + nbytes

    def collective(self, ready: Array, seconds: float, axis: Axis) -> Array:
        """Return when all have ended what takes ``seconds`` from when all have begun."""
        start = np.maximum(self.last(ready, axis), self.busy[axis])
        self.busy[axis] = start + seconds
        return self.busy[axis]

    def ring(self, ready: Array, nbytes: float, axis: Axis, turns: int, together: int = 0) -> Array:
        """Return the end of ``turns`` around a ring, in whose every hop all send ``nbytes``.

        On "node" ``together`` rings share each link, those of all local ranks unless given.
        """
        size, many = self.fabric.size(axis), together or self.fabric.ranks_per_node
        hops = turns * (size - 1)
        if axis != "local" and self.fabric.nodes > 1:
            self.crossed += hops * nbytes * (many if axis == "node" else 1)
        return self.collective(ready, hops * self.fabric.hop(axis, nbytes, many), axis)

    def all_reduce(self, ready: Array, nbytes: int, axis: Axis) -> Array:
        r"""Return the end of an all-reduce: 2 (n-1) hops of 1/n.

        .. math:: \max_i s_i + 2 (n-1) \left(\alpha + \frac{m}{n B}\right)
        """
        size = self.fabric.size(axis)
        self.count(axis, 2 * (size - 1) * nbytes // size)
        return self.ring(ready, nbytes / size, axis, 2)

    def all_gather(self, ready: Array, nbytes: "int | Array", axis: Axis) -> Array:
        r"""Return the end of an all-gather of ``nbytes`` from everybody: n-1 hops.

        .. math:: \max_i s_i + (n-1) \left(\alpha + \frac{m}{B}\right)

        ``nbytes`` may differ between the ranks of a node, which are in groups of their own.
        """
        self.count(axis, (self.fabric.size(axis) - 1) * nbytes)
        return self.ring(ready, float(np.mean(nbytes)), axis, 1)

    def staged(self, ready: Array, nbytes: int, axis: Axis, rounds: int = 1) -> Array:
        r"""Return the end of pairwise exchanges with all others, one distance after the other.

        .. math:: \max_i s_i + rounds \sum_{h=1}^{n-1} \left(2 \alpha + \frac{m}{B}\right)

        The receive of a message is announced before it is sent, hence twice the latency.
        """
        size, fabric = self.fabric.size(axis), self.fabric
        self.count(axis, rounds * (size - 1) * nbytes)
        leaving = fabric.leaving(axis)
        between = leaving[leaving > 0]
        seconds = (size - 1 - len(between)) * (fabric.inside(nbytes) + fabric.inside_latency)
        seconds += 2 * fabric.latency * len(between) + fabric.busy(1, 1) * nbytes * between.sum()
        self.crossed += rounds * float(leaving.sum()) * nbytes
        return self.collective(ready, rounds * float(seconds), axis)

    def at_once(self, ready: Array, nbytes: int, axis: Axis) -> Array:
        """Return the end of an exchange of ``nbytes`` with all others at the same time."""
        size, fabric = self.fabric.size(axis), self.fabric
        self.count(axis, (size - 1) * nbytes)
        if axis == "local" or fabric.nodes == 1:
            return self.collective(ready, fabric.inside((size - 1) * nbytes), axis)
        outside = size - (fabric.ranks_per_node if axis == "world" else 1)
        leaving = fabric.ranks_per_node * outside * nbytes
        self.crossed += leaving
        return self.collective(ready, fabric.seconds(leaving), axis)

    def through_first(self, ready: Array, nbytes: int, axis: Axis) -> Array:
        r"""Return the end of a sum of ``nbytes`` that the first member adds, and sends to all.

        .. math:: \max_i s_i + 2 \left(\alpha + (n-1) \frac{m}{B}\right)
        """
        size, local, fabric = self.fabric.size(axis), self.fabric.ranks_per_node, self.fabric
        sent = np.full(self.now.shape, nbytes)
        firsts = {"world": (0, 0), "node": (0,), "local": (slice(None), 0)}[axis]
        sent[firsts] = (size - 1) * nbytes
        self.count(axis, sent)
        if axis == "local" or fabric.nodes == 1:
            return self.collective(ready, 2 * fabric.inside((size - 1) * nbytes), axis)
        leaving = np.full(fabric.nodes, local * nbytes)
        leaving[0] = (local * (size - 1) if axis == "node" else size - local) * nbytes
        self.crossed += leaving
        return self.collective(ready, 2 * fabric.seconds(float(leaving[0])), axis)

    def mean(self, ready: Array, numel: int, itemsize: int, axis: Axis) -> Array:
        """Return the end of a mean: an all-reduce, or of 16 bits two staged exchanges."""
        if itemsize > 2:
            return self.all_reduce(ready, numel * itemsize, axis)
        chunk = -(-numel // self.fabric.size(axis))
        return self.staged(ready, chunk * itemsize, axis, rounds=2)

    def broadcast(self, ready: Array, nbytes: int) -> Array:
        """Return the end of a broadcast inside every node, whose ranks all wait for it."""
        self.count("local", nbytes)
        hops = (self.fabric.ranks_per_node - 1).bit_length()
        return self.collective(ready, hops * self.fabric.inside(nbytes), "local")
