"""``sgp`` and ``d_psgd``: gossip with the peers of a graph, at once or some steps later."""

from functools import lru_cache
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from offbeat.functional import accumulation_dtype
from offbeat.methods import PushSum
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric, Path
from offbeat.plan.methods.slot import Section, StepTimes, gather_slices, sections, slices_on
from offbeat.plan.profile import Profile
from offbeat.topology import Phases, Symmetric, Topology
from offbeat.topology.schedule import due

HEADER = 16  # bytes: the weight and the number of the exchange


class Graph(NamedTuple):
    """The edges of one exchange.

    ``near`` holds for each participant itself and all whom it sends to or receives from, filled
    up with itself (participants, most neighbours); ``sent`` the messages that each one sends,
    ``out`` those that leave its node, from ``here`` to ``there``. ``keeps`` tells whether all
    weights stay as they are.
    """

    near: NDArray[np.int64]
    sent: Array
    out: Array
    here: NDArray[np.int64]
    there: NDArray[np.int64]
    received: Array
    keeps: bool


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
        self.exchange, self.axis, self.fabric = exchange, exchange.over, fabric
        self.size, slices = fabric.size(exchange.over), slices_on(fabric, exchange)
        self.held = sections(profile.tensors, slices)
        self.sums = [Section(held.numel, max(held.itemsize, 4)) for held in self.held]
        narrow = exchange.wire == "bf16"
        widths = [min(held.itemsize, 2) if narrow else held.itemsize for held in self.held]
        self.body = [Section(h.numel, width) for h, width in zip(self.held, widths, strict=True)]
        self.message = sum(section.nbytes for section in self.body)
        wide = all(t.dtype == accumulation_dtype(t.dtype) for t in profile.tensors.values())
        self.is_exact = wide and not narrow
        self.ahead = max(exchange.every, exchange.overlap)
        topology = exchange.topology
        self.period = self.ahead * topology.period(self.size)
        self.lead = self.ahead * sum(count or 0 for count in phase_lengths(topology))
        graphs = [graph for part in topology.parts() for graph in self._period(part)]
        keeps = all(graph.keeps for graph in graphs)
        # Also of a mean of all, which is an all-reduce, a buffer for each sender is allocated.
        means = any(part.is_mean(self.size, 0) for part in topology.parts())
        peers = max([means * (self.size - 1), *(int(graph.received.max()) for graph in graphs)])
        self.has_anchor = (exchange.overlap > 0 or not keeps or not wide) and not exchange.biased
        buffers = (1 + peers) * (2 if exchange.overlap else 1) * self.message
        self.memory = buffers + sum(s.nbytes for s in self.sums) * self.has_anchor
        self.memory += profile.nbytes if slices > 1 else 0
        self.memory += profile.nbytes if exchange.nonfinite == "skip" else 0
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.pending: Array | None = None

    def step(self, clocks: Clocks, step: int) -> None:
        """Exchange with the peers of this step, if it is a sending step."""
        speeds, numel = clocks.speeds, sum(section.numel for section in self.held)
        by_nodes = self.axis == "node"
        clocks.spend(clocks.profile.numel * speeds.copy if by_nodes else 0.0)
        if step % self.ahead == 0 if self.exchange.overlap else due(step, self.ahead):
            clocks.spend(numel * speeds.fill)
            if self.exchange.overlap:
                if self.pending is not None:
                    clocks.wait(self.pending)
                self.pending = self.launch(clocks, step // self.ahead)
            else:
                clocks.wait(self.launch(clocks, step // self.ahead))
            clocks.spend(numel * speeds.merge)
        elif self.has_anchor:
            clocks.spend(numel * speeds.add)
        gather_slices(clocks, self.held, self.axis)
        clocks.spend(clocks.profile.numel * speeds.copy if by_nodes else 0.0)

    def launch(self, clocks: Clocks, index: int) -> Array:
        """Return when the messages of exchange ``index`` have been sent and received."""
        topology = self.exchange.topology
        if topology.is_mean(self.size, index):
            if self.is_exact:
                ends = [clocks.all_reduce(clocks.now, HEADER, self.axis)]
                ends += [clocks.all_reduce(clocks.now, s.nbytes, self.axis) for s in self.body]
                return ends[-1]
            return clocks.at_once(clocks.now, HEADER + self.message, self.axis)
        return self._push(clocks, self._turn(index))

    def _turn(self, index: int) -> int:
        """Return the first exchange with the edges of exchange ``index``."""
        lead, period = self.lead // self.ahead, self.exchange.topology.period(self.size)
        return index if index < lead else lead + (index - lead) % period

    def _push(self, clocks: Clocks, index: int) -> Array:
        graph = _graph(self.exchange.topology, self.size, index, self._each)
        nbytes = HEADER + self.message
        # Participants that are nodes exchange by all their ranks at once, each its slice.
        shape, by_nodes = clocks.now.shape, self.axis == "node"
        ready = clocks.now if by_nodes else clocks.now.reshape(-1, 1)
        clocks.count(
            self.axis, nbytes * (graph.sent[:, None] if by_nodes else graph.sent.reshape(shape))
        )
        fabric, each = clocks.fabric, clocks.fabric.ranks_per_node
        many = each if by_nodes else 1
        clocks.crossed += many * nbytes * graph.out
        # The slowest message that leaves or reaches a node, and that of all whom one waits for.
        latency, per_byte = np.zeros(fabric.nodes), np.zeros(fabric.nodes)
        found = fabric.paths(graph.here, graph.there)
        for ends in (graph.here, graph.there):
            np.maximum.at(latency, ends, found[0])
            np.maximum.at(per_byte, ends, many * found[1])
        if not by_nodes:
            latency, per_byte = latency.repeat(each), per_byte.repeat(each)
        slowest = per_byte[graph.near].max(axis=1)
        path = Path(float(latency.max()), float(slowest.max()))
        lost = clocks.confirm(("gossip", index), float(ready.max()), nbytes, path)
        carried = slowest * fabric.beyond_burst(nbytes * many) / many
        far = 2 * latency[graph.near].max(axis=1) + carried + lost
        wires = np.where(slowest > 0, far, 2 * fabric.inside(nbytes))
        arrival: Array = ready[graph.near].max(axis=1) + wires[:, None]
        return arrival.reshape(shape)

    def _period(self, part: Topology) -> list[Graph]:
        """Return the edges of one period of a topology, but for means of all participants."""
        indices = [i for i in range(part.period(self.size)) if not part.is_mean(self.size, i)]
        return [_graph(part, self.size, index, self._each) for index in indices]

    @property
    def _each(self) -> int:
        """The number of participants of a node."""
        return 1 if self.axis == "node" else self.fabric.ranks_per_node


def phase_lengths(topology: Topology) -> list[int | None]:
    """Return the numbers of exchanges of the phases of a topology; None for the last one."""
    inner = topology.graph if isinstance(topology, Symmetric) else topology
    phases = inner.phases if isinstance(inner, Phases) else ()
    return [count for count, _ in phases]


@lru_cache(maxsize=256)  # at 4,096 participants a period takes a quarter of a second
def _graph(topology: Topology, size: int, index: int, each: int) -> Graph:
    """Return the edges of an exchange between participants, of which a node has ``each``."""
    found = [topology.peers(rank, size, index) for rank in range(size)]
    edges = [(rank, to, p) for rank, peers in enumerate(found) for to, p in peers.send]
    source, target = np.array([edge[:2] for edge in edges], np.int64).reshape(-1, 2).T
    mass = np.bincount(target, [p for *_, p in edges], size) + [peers.keep for peers in found]
    groups = [{r, *(to for to, _ in p.send), *p.receive} for r, p in enumerate(found)]
    most = max(map(len, groups))
    near = np.array([[*g, *[r] * (most - len(g))] for r, g in enumerate(groups)], np.int64)
    here, there = source // each, target // each
    crossing, nodes = here != there, size // each
    here, there = here[crossing], there[crossing]
    counted = [(source, size), (here, nodes), (target, size)]
    counts = (np.bincount(numbers, minlength=most).astype(float) for numbers, most in counted)
    sent, out, received = counts
    keeps = bool(np.allclose(mass, 1.0, rtol=0, atol=1e-9))
    return Graph(near, sent, out, here, there, received, keeps)
