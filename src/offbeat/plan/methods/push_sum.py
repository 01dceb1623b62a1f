"""``sgp`` and ``d_psgd``: gossip with the peers of a graph, at once or some steps later."""

from functools import lru_cache
from typing import NamedTuple, final

import numpy as np

from offbeat.methods import PushSum
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric, Path
from offbeat.plan.methods.slot import (
    Ranks,
    Section,
    StepTimes,
    gather_slices,
    partners,
    sections,
    slices_on,
)
from offbeat.plan.profile import Profile
from offbeat.topology import Phases, Symmetric, Topology
from offbeat.topology.graph import Edges
from offbeat.topology.schedule import due

HEADER = 16  # bytes: the weight and the number of the exchange


class Graph(NamedTuple):
    """The edges of one exchange.

    ``near`` (most, n) are each participant and its neighbours; ``sent`` the messages that each one
    sends, and ``out`` those that leave each node, from ``here`` to ``there``. ``senders``: the most
    messages that one receives. ``keeps``: whether all weights stay as they are. ``distance``: from
    the first participant that sends to whom it does.
    """

    near: Ranks
    sent: Array
    out: Array
    here: Ranks
    there: Ranks
    senders: int
    keeps: bool
    distance: int


@final
class PushSumTimes(StepTimes):
    r"""Models :class:`offbeat.methods.PushSum`: each participant waits for its neighbours.

    .. math::
        f_i = \max_{j \in N_i} s_j + 2 \alpha + \max_{j \in N_i}
        \frac{\max(out_j, in_j)}{B}, \qquad s_i(k) = \max\big(t_i, f_i(k - \tau)\big)

    with the neighbours N that i sends to or receives from, itself among them, and the bytes that
    pass a node's link. Without overlap :math:`t_i \leftarrow f_i`; with it the next message is
    sent, and the step goes on, when the last one has arrived. A mean of all participants is an
    all-reduce.
    """

    def __init__(self, exchange: PushSum, profile: Profile, fabric: Fabric) -> None:
        """Look up the peers of every participant, and raise the errors of the exchange."""
        self.exchange, self.axis, topology = exchange, exchange.over, exchange.topology
        self.size, slices = fabric.size(exchange.over), slices_on(fabric, exchange)
        self.each = 1 if self.axis == "node" else fabric.ranks_per_node  # participants of a node
        self.held = sections(profile.tensors, slices)
        self.sums = [Section(held.numel, max(held.itemsize, 4)) for held in self.held]
        narrow, wide = exchange.wire == "bf16", self.sums == self.held
        self.body = [Section(h.numel, min(h.itemsize, 2 if narrow else 8)) for h in self.held]
        self.message = sum(section.nbytes for section in self.body)
        self.is_exact = wide and not narrow
        self.ahead = max(exchange.every, exchange.overlap)
        self.period = self.ahead * topology.period(self.size)
        inner = topology.graph if isinstance(topology, Symmetric) else topology
        phases = inner.phases if isinstance(inner, Phases) else ()
        self.lead = self.ahead * sum(count or 0 for count, _ in phases)
        every = [(p, index) for p in topology.parts() for index in range(p.period(self.size))]
        gossip = [each for each in every if not each[0].is_mean(self.size, each[1])]
        graphs = [_graph(part, self.size, index, self.each) for part, index in gossip]
        keeps = all(graph.keeps for graph in graphs)
        # Also of a mean of all, which is an all-reduce, a buffer for each sender is allocated.
        means = any(part.is_mean(self.size, 0) for part in topology.parts())
        senders = max([means * (self.size - 1), *(graph.senders for graph in graphs)])
        self.has_anchor = (exchange.overlap > 0 or not keeps or not wide) and not exchange.biased
        self.memory = (1 + senders) * (2 if exchange.overlap else 1) * self.message
        self.memory += sum(s.nbytes for s in self.sums) * self.has_anchor
        self.memory += profile.nbytes * ((slices > 1) + (exchange.nonfinite == "skip"))
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.pending: Array | None = None

    def step(self, clocks: Clocks, step: int) -> None:
        """Exchange with the peers of this step, if it is a sending step."""
        speeds, numel = clocks.speeds, sum(section.numel for section in self.held)
        copied = clocks.profile.numel * speeds.copy if self.axis == "node" else 0.0
        clocks.spend(copied)
        if step % self.ahead == 0 if self.exchange.overlap else due(step, self.ahead):
            clocks.spend(numel * speeds.fill)
            if self.exchange.overlap:
                if self.pending is not None:
                    clocks.wait(self.pending)
                self.pending = self._launch(clocks, step // self.ahead)
            else:
                clocks.wait(self._launch(clocks, step // self.ahead))
            clocks.spend(numel * speeds.merge)
        elif self.has_anchor:
            clocks.spend(numel * speeds.add)
        gather_slices(clocks, self.held, self.axis)
        clocks.spend(copied)

    def _launch(self, clocks: Clocks, index: int) -> Array:
        """Return when the messages of exchange ``index`` have been sent and received."""
        topology = self.exchange.topology
        if not topology.is_mean(self.size, index):
            lead, period = self.lead // self.ahead, topology.period(self.size)
            first = index if index < lead else lead + (index - lead) % period  # with these edges
            return self._push(clocks, first)
        if not self.is_exact:
            return clocks.at_once(clocks.now, HEADER + self.message, self.axis)
        arrival = clocks.all_reduce(clocks.now, HEADER, self.axis)
        for section in self.body:
            arrival = clocks.all_reduce(clocks.now, section.nbytes, self.axis)
        return arrival

    def _push(self, clocks: Clocks, index: int) -> Array:
        # Participants that are nodes exchange by all their ranks at once, each its slice.
        ready = clocks.now if self.axis == "node" else clocks.now.reshape(-1, 1)
        graph = _graph(self.exchange.topology, self.size, index, self.each)
        nbytes, shape, by_nodes = HEADER + self.message, clocks.now.shape, self.axis == "node"
        clocks.count(
            self.axis, nbytes * (graph.sent[:, None] if by_nodes else graph.sent.reshape(shape))
        )
        fabric, many = clocks.fabric, clocks.fabric.ranks_per_node if by_nodes else 1
        clocks.crossed += many * nbytes * graph.out
        way, each, shared = fabric.paths(graph.here, graph.there)
        passing = np.maximum(0.0, many * nbytes - fabric.spared / shared)
        path = Path(float(way.max(initial=0)), many * float(each.max(initial=0)))
        at = float(ready.max())
        lost = clocks.confirm(("gossip", graph.distance), at, nbytes, path)
        back = clocks.windows["gossip", -graph.distance % self.size]
        back.rest(at, 2 * path.latency)  # which carries words
        if fabric.sites:
            return self._over_sites(clocks, graph, way, passing, lost)
        # The slowest message that leaves or reaches a node, and that of all whom one waits for.
        latency, per_byte, carried = np.zeros((3, fabric.nodes))
        for ends in (graph.here, graph.there):
            np.maximum.at(latency, ends, way)
            np.maximum.at(per_byte, ends, each)
            np.maximum.at(carried, ends, each * passing)
        latency, slowest, carried = (
            of_node.repeat(self.each)[graph.near].max(axis=0)
            for of_node in (latency, per_byte, carried)
        )
        wires = np.where(slowest > 0, 2 * latency + carried + lost, 2 * fabric.inside(nbytes))
        arrival: Array = ready[graph.near].max(axis=0) + wires[:, None]
        return arrival.reshape(shape)

    def _over_sites(
        self, clocks: Clocks, graph: Graph, way: Array, nbytes: Array, lost: float
    ) -> Array:
        """Return when the ranks of each node have its messages: each waits for both of its ends."""
        ready = clocks.now.max(axis=1)
        begun = np.maximum(ready[graph.here], ready[graph.there])
        taken = clocks.in_turn(graph.here, graph.there, begun, nbytes)
        ended = begun + 2 * way + taken + lost * (way > clocks.fabric.latency)
        arrival = ready + 2 * clocks.fabric.inside(HEADER + self.message) * (self.each > 1)
        for ends in (graph.here, graph.there):
            np.maximum.at(arrival, ends, ended)
        return np.broadcast_to(arrival[:, None], clocks.now.shape)


@lru_cache(maxsize=256)  # at 4,096 participants a period takes a quarter of a second
def _graph(topology: Topology, size: int, index: int, each: int) -> Graph:
    """Return the graph of an exchange between participants, of which a node has ``each``."""
    edges = Edges.of(topology, size, index)
    others = edges.to != edges.source
    source, to = edges.source[others], edges.to[others]
    keeps = bool(np.allclose(edges.received(np.ones(size)), 1.0, rtol=0, atol=1e-9))
    crossing = source // each != to // each
    here, there = source[crossing] // each, to[crossing] // each
    sent = np.bincount(source, minlength=size).astype(float)
    out = np.bincount(here, minlength=size // each).astype(float)
    senders = int(np.bincount(to, minlength=size).max())
    distance = int((to - source)[:1].sum() % size)
    own = np.arange(size)
    near = partners(np.concatenate((own, source)), np.concatenate((own, to)), size)
    return Graph(near, sent, out, here, there, senders, keeps, distance)
