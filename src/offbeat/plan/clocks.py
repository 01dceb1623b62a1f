"""The clocks of all ranks, what they have sent, and the collectives that join them."""

from collections import defaultdict
from collections.abc import Hashable
from typing import final

import numpy as np
from numpy.typing import NDArray

from offbeat.plan.fabric import Fabric, Path
from offbeat.plan.profile import Profile
from offbeat.plan.sites import Nodes
from offbeat.plan.windows import FAR, Windows, lossy
from offbeat.platform.peers import is_mesh
from offbeat.transport.collectives import AT_ONCE
from offbeat.transport.world import Axis

Array = NDArray[np.float64]
FOLLOWED = 64  # hops on far links that are followed one by one; the others are like the last
GLOO_SEGMENT = 2**20  # bytes of a message of a ring, at most; two are on their way


@final
class Clocks:
    """Holds the time of every rank's training thread, in arrays (nodes, ranks per node).

    A collective joins the members of a group: it begins when the last of them has come and the
    last but one of the group has ended, since Gloo runs two at a time. They share the link. Its
    hops, rounds of max-plus algebra in which everybody waits for a neighbour, end at the same time
    on all members after one turn.

    Attributes:
        fabric: the network.
        profile: the times of a step.
        speeds: those of passes over memory.
        now: the time of every rank.
        began: the time of every rank from which steps count.
        pace: by how much longer each rank computes in this step.
        lanes: when the last two collectives on each axis have ended, the earlier first.
        carried: when the bytes of the last one have passed.
        sent: bytes that ranks have sent, by axis, as ``replica.stats()`` counts them.
        crossed: bytes that have left each node (nodes,).
        windows: those of TCP, for each kind of connections.
        drained: when the links could pass no burst; they can pass more from then on.
        free: when each link between two sites has passed all messages.
        passing: when the messages of the last rings pass far links, in order.
    """

    def __init__(self, fabric: Fabric, profile: Profile) -> None:
        """Start all clocks at zero."""
        self.fabric, self.profile, self.speeds = fabric, profile, profile.speeds
        zeros = np.zeros((fabric.nodes, fabric.ranks_per_node))
        self.now = self.began = zeros
        self.pace = np.ones_like(zeros)
        self.lanes: dict[Axis, tuple[Array, Array]] = defaultdict(lambda: (zeros, zeros))
        self.carried: dict[Axis, Array] = defaultdict(lambda: zeros)
        self.sent: dict[Axis, Array] = {}
        self.crossed = np.zeros(fabric.nodes)
        self.windows: dict[Hashable, Windows] = defaultdict(Windows)
        self.drained = -np.inf
        self.free: dict[int, float] = defaultdict(lambda: -np.inf)
        self.passing: dict[Axis, list[tuple[float, float]]] = defaultdict(list)

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
        """Return the latest of the ``times`` in every group, in arrays that numpy broadcasts."""
        over = {"world": (0, 1), "node": (0,), "local": (1,)}[axis]
        found: Array = np.maximum.reduce(times, axis=over, keepdims=True)
        return found

    def count(self, axis: Axis, nbytes: "float | Array") -> None:
        """Count bytes that every rank, or each one its own, has sent."""
        self.sent[axis] = self.sent.get(axis, np.zeros(self.now.shape)) + nbytes

    def confirm(self, key: Hashable, at: float, nbytes: float, path: Path, width: int = 0) -> float:
        """Return how long a message on the connections ``key`` waits for TCP's confirmations."""
        if path.latency < FAR or nbytes <= 0:
            return 0.0
        trip, count = 2 * path.latency, width or self.fabric.width(nbytes)
        most = lossy(self.fabric.loss, trip)
        seconds = path.per_byte * nbytes
        return self.windows[key].wait(at, nbytes / count, seconds, trip, most)

    def start(self, ready: Array, axis: Axis) -> Array:
        """Return when a collective can begin of which ranks are ``ready``."""
        return np.maximum(self.last(ready, axis), self.lanes[axis][0])

    def collective(
        self, ready: Array, seconds: float, axis: Axis, carried: float | None = None
    ) -> Array:
        """Return when all have ended what takes ``seconds`` from when all have begun.

        It occupies the links for ``carried`` seconds, by default all of them.
        """
        busy = seconds if carried is None else carried
        begun, other = self.start(ready, axis), self.lanes[axis][1]
        # What is still to pass of the other one comes between the hops of this one; on far links,
        # which rest while each hop waits for its round trip, only where ring() has found it.
        queued = np.maximum(self.carried[axis] - begun, 0.0)
        between = queued / 2 * (axis == "local" or self.fabric.farthest < FAR)
        ended = begun + np.maximum(seconds + between, queued + busy)
        self.lanes[axis] = np.minimum(other, ended), np.maximum(other, ended)
        self.carried[axis] = begun + queued + busy
        return ended

    def ring(self, ready: Array, nbytes: float, axis: Axis, turns: int, together: int = 0) -> Array:
        r"""Return the end of ``turns`` around a ring, in whose every hop all send ``nbytes``.

        .. math::
            h \max(2 \alpha + \tfrac{m}{2 B}, \tfrac{m}{B}) + t \min(2 \alpha, \tfrac{m}{2 B})

        for h hops of m bytes in t turns: Gloo sends them in halves of at most 1 MiB, each only
        after its receive was announced, and ends a turn before the next one begins.
        On "node" ``together`` rings share each link, those of all local
        ranks unless given.
        """
        fabric, many = self.fabric, together or self.fabric.ranks_per_node
        hops = turns * (fabric.size(axis) - 1)
        if axis == "local" or fabric.nodes == 1:
            return self.collective(ready, hops * fabric.inside(nbytes), axis)
        self.crossed += hops * nbytes * (many if axis == "node" else 1)
        path, width = fabric.path(axis, 1, many), fabric.width(nbytes * fabric.size(axis))
        pieces = max(2.0, nbytes / width / GLOO_SEGMENT)
        piece = path.per_byte * nbytes / pieces
        first = path.per_byte * fabric.beyond_burst(nbytes / pieces)
        hop = pieces / 2 * max(2 * path.latency + first, 2 * piece)
        if axis == "world" and fabric.ranks_per_node > 1:
            hop = max(hop, fabric.inside(nbytes))
        begun = float(self.start(ready, axis).max())
        turn = [*[hop] * (fabric.size(axis) - 2), hop + min(2 * path.latency, piece)]
        seconds = self._hops(begun, turns * turn, nbytes, path, width, axis)
        # Connections that lose packets are in use all the time, by one ring after the other.
        carried = seconds if fabric.loss else hops * path.per_byte * nbytes
        if path.latency < FAR:
            passing = self._pass(begun, carried)
            seconds, carried = seconds + passing - carried, passing
        ended = self.collective(ready, seconds, axis, carried)
        used = self.windows[axis, 1]
        used.last = max(used.last, float(ended.max()) - path.latency)  # of its last bytes
        return ended

    def _hops(
        self, at: float, hops: list[float], nbytes: float, path: Path, width: int, axis: Axis
    ) -> float:
        """Return the seconds of a ring from ``at`` on whose ``hops`` take these alone.

        On far links messages wait for TCP's confirmations, and behind one of another ring that is
        passing as they leave.
        """
        if path.latency < FAR:
            return sum(hops)
        before, own = [each for each in self.passing[axis] if each[1] > at], []
        seconds = lost = 0.0
        for hop in hops[:FOLLOWED]:
            lost = self.confirm((axis, 1), at + seconds, nbytes, path, width)
            leaves = at + seconds + path.latency  # once the word of the receive has come
            for begun, ended in before:
                if begun <= leaves < ended:
                    leaves, seconds = ended, seconds + ended - leaves
            own.append((leaves, leaves + path.per_byte * nbytes))
            seconds += hop + lost
        self.passing[axis] = sorted(before + own)
        return seconds + sum(hop + lost for hop in hops[FOLLOWED:])

    def all_reduce(self, ready: Array, nbytes: int, axis: Axis) -> Array:
        """Return the end of an all-reduce: 2 (n-1) hops of 1/n."""
        size = self.fabric.size(axis)
        self.count(axis, 2 * (size - 1) * nbytes // size)
        return self.ring(ready, nbytes / size, axis, 2)

    def all_gather(self, ready: Array, nbytes: "int | Array", axis: Axis) -> Array:
        """Return the end of an all-gather of ``nbytes`` from everybody: n-1 hops, or one.

        ``nbytes`` may differ between the ranks of a node, which are in groups of their own.
        """
        size, width = self.fabric.size(axis), 1 if axis == "local" else self.fabric.connections
        if (size - 1) * np.max(nbytes) <= AT_ONCE and is_mesh(size, width):
            is_near = axis == "local" or self.fabric.nodes == 1
            word = self.fabric.inside_latency if is_near else self.fabric.farthest
            return self.at_once(self.start(ready, axis) + word, nbytes, axis)
        self.count(axis, (size - 1) * nbytes)
        return self.ring(ready, float(np.mean(nbytes)), axis, 1)

    def staged(
        self, ready: Array, nbytes: int, axis: Axis, rounds: int = 1, together: int = 0
    ) -> Array:
        r"""Return the end of pairwise exchanges with all others, one distance after the other.

        .. math:: \max_i s_i + rounds \sum_{h=1}^{n-1} \left(2 \alpha + \frac{m}{B}\right)

        The receive of a message is announced before it is sent, hence twice the latency. On far
        links all leave at once, and the latency counts once in a round. On "node" ``together``
        local ranks exchange at the same time, all unless given.
        """
        size, fabric = self.fabric.size(axis), self.fabric
        many = together or fabric.ranks_per_node
        leaving = np.minimum(fabric.leaving(axis), many)
        ready = np.maximum(ready, self.lanes[axis][1])  # a thread of the group exchanges in turn
        if axis != "local" and fabric.farthest >= FAR and fabric.nodes > 1:
            for _ in range(rounds):
                begun = self.start(ready, axis) + fabric.farthest
                ready = self.at_once(begun, nbytes, axis, together)
            return ready
        self.count(axis, rounds * (size - 1) * nbytes * many / fabric.ranks_per_node)
        self.crossed += rounds * float(leaving.sum()) * nbytes
        between = leaving[leaving > 0]
        seconds = (size - 1 - len(between)) * (fabric.inside(nbytes) + fabric.inside_latency)
        ways = Path(fabric.latency * len(between), fabric.busy(1, 1) * between.sum())
        if fabric.sites and len(between):
            ways = fabric.around(axis, many)
        seconds = rounds * (seconds + 2 * ways.latency)
        passing = float(rounds * ways.per_byte * nbytes)
        seconds += self._pass(float(self.start(ready, axis).max()), passing)
        return self.collective(ready, float(seconds), axis)

    def at_once(self, ready: Array, nbytes: "int | Array", axis: Axis, together: int = 0) -> Array:
        """Return the end of an exchange of ``nbytes`` with all others at the same time.

        On "node" ``together`` local ranks do so, all unless given.
        """
        size, fabric = self.fabric.size(axis), self.fabric
        many = together or fabric.ranks_per_node
        self.count(axis, (size - 1) * nbytes * many / fabric.ranks_per_node)
        sent = float(np.mean(nbytes))
        if axis == "local" or fabric.nodes == 1:
            return self.collective(ready, fabric.inside((size - 1) * sent), axis)
        outside = size - (fabric.ranks_per_node if axis == "world" else 1)
        self.crossed += many * outside * sent
        path, shared = fabric.all_pairs(many * outside)
        at = float(self.start(ready, axis).max())
        passing = self._pass(at, path.per_byte * sent, path.per_byte * fabric.burst / shared)
        faster = path._replace(per_byte=passing / sent if sent else 0.0)
        lost = self.confirm((axis, "at once"), at, sent, faster)
        return self.collective(ready, path.latency + passing + lost, axis)

    def in_turn(self, source: Nodes, target: Nodes, begun: Array, nbytes: Array) -> Array:
        """Return how long messages between nodes take if links of sites pass one after the other.

        In the order in which they have ``begun``: also if two nodes begin together, the one whose
        message ends first computes while that of the other passes, and is the first again.
        """
        fabric, sites = self.fabric.without_sites, self.fabric.sites
        assert sites is not None, "there are links between them"
        taken: Array = fabric.paths(source, target)[1] * nbytes
        _, per_byte, shared = sites.between(source, target)
        seconds, links = per_byte / shared * nbytes, sites.pair(source, target)
        is_far = links // len(sites.nodes) != links % len(sites.nodes)
        ends = np.sort((source, target), axis=0)  # two nodes take their turns together
        order = np.lexsort((ends[1], ends[0], begun))
        for index in order[is_far[order]]:
            link, start = int(links[index]), float(begun[index])
            self.free[link] = max(start, self.free[link]) + float(seconds[index])
            taken[index] = max(taken[index], self.free[link] - start)
        return taken

    def _pass(self, at: float, seconds: float, burst: float = 0.0) -> float:
        """Return how long bytes of ``seconds`` take on links that pass a burst after a rest.

        ``burst``: its seconds, by default those of the link of a node.
        """
        burst = burst or self.fabric.busy(self.fabric.burst, 0)
        rested = min(burst, max(0.0, at - self.drained))
        taken = max(0.0, seconds - rested)
        self.drained = max(at, self.drained) + taken - max(0.0, rested - seconds)
        return taken

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
        seconds = fabric.farthest + fabric.busy(leaving[0], leaving[0])
        return self.collective(ready, 2 * seconds, axis)

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
