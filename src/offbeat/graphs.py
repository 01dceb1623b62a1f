"""The graphs of the papers, and your own: who sends to whom, in which exchange."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from offbeat.topology import Peers, Topology


@final
@dataclass(frozen=True)
class Exponential(Topology):
    """To ``peers`` participants that are powers of two ahead, other ones in every exchange.

    The hops are ``2^((index * peers + j) mod ceil(log2 n))`` for j < ``peers``, shares are equal.
    One peer averages exactly within one period when the size is a power of two (Assran et al.
    2019, section 3 and appendix A). Sends ``peers`` models per participant and exchange.

    >>> [Exponential().peers(0, 8, index).send for index in range(3)]
    [((1, 0.5),), ((2, 0.5),), ((4, 0.5),)]
    >>> [to for to, _ in Exponential(peers=2).peers(0, 8, index=1).send]
    [4, 1]
    """

    number: int = 1

    def __init__(self, peers: int = 1) -> None:
        """Check the number of peers; how many there can be depends on the world."""
        if type(peers) is not int or peers < 1:
            raise ValueError(f"peers={peers!r}, expected a whole number, 1 or more")
        object.__setattr__(self, "number", peers)

    def __repr__(self) -> str:
        return f"Exponential(peers={self.number})"

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Equal shares for the peers and oneself."""
        powers = max(1, (size - 1).bit_length())
        if self.number > powers:
            raise ValueError(
                f"peers={self.number} at size {size}: there are {powers} powers of two below "
                f"{size}; use peers={powers} or fewer, or Complete()"
            )
        hops = [2 ** ((index * self.number + j) % powers) for j in range(self.number)]
        share = 1 / (self.number + 1)
        send = tuple(((rank + hop) % size, share) for hop in hops)
        return Peers(send, tuple((rank - hop) % size for hop in hops), share)

    def period(self, size: int) -> int:
        """After which the first peer is the first again."""
        powers = max(1, (size - 1).bit_length())
        return powers // math.gcd(powers, self.number)


@final
@dataclass(frozen=True)
class BipartiteExponential(Topology):
    """Even and odd participants in pairs, at distances 1, 3, 5, 9, 17, ...: undirected.

    Every pair averages; all weights stay 1. For an even number of participants. Sends one model
    per participant and exchange.

    >>> [BipartiteExponential().peers(0, 8, index).receive for index in range(3)]
    [(1,), (3,), (5,)]
    """

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Half to the partner, half stays."""
        if size % 2:
            raise ValueError(
                f"{self} at size {size}: pairs need an even number of participants; use Ring()"
            )
        power = index % self.period(size)
        distance = 2**power + 1 if power else 1
        partner = (rank + (distance if rank % 2 == 0 else -distance)) % size
        return Peers(((partner, 0.5),), (partner,), 0.5)

    def period(self, size: int) -> int:
        """The number of distances below the size."""
        return max(1, (size - 2).bit_length())


@final
@dataclass(frozen=True)
class Ring(Topology):
    """Both neighbours on a ring, equal shares; with two participants, each other.

    Sends two models per participant and exchange. Mixes slowly in large worlds: the error
    shrinks by about ``1 - 13 / n^2`` per exchange.

    >>> Ring().peers(0, 4, index=0)
    Peers(send=((3, 0.333...), (1, 0.333...)), receive=(3, 1), keep=0.333...)
    """

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Equal shares for the neighbours and oneself."""
        near = tuple(dict.fromkeys(((rank - 1) % size, (rank + 1) % size)))
        share = 1 / (len(near) + 1)
        return Peers(tuple((peer, share) for peer in near), near, share)

    def period(self, size: int) -> int:
        """One: the ring does not change."""
        return 1


@final
@dataclass(frozen=True)
class Complete(Topology):
    """Everyone to everyone, equal shares: the mean of all in every exchange.

    Goes the way of an all-reduce: 2 (n-1)/n of the model's bytes per participant and exchange;
    (n-1) models with a 16-bit wire.

    >>> Complete().peers(1, 3, index=0)
    Peers(send=((0, 0.333...), (2, 0.333...)), receive=(0, 2), keep=0.333...)
    """

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """An equal share for everyone."""
        others = tuple(other for other in range(size) if other != rank)
        return Peers(tuple((other, 1 / size) for other in others), others, 1 / size)

    def period(self, size: int) -> int:
        """One: the graph does not change."""
        return 1

    def is_mean(self, size: int, index: int) -> bool:
        """Always."""
        return True


@final
@dataclass(frozen=True, repr=False)
class Digraph(Topology):
    """Graphs of networkx: one, several that take turns, or what makes them for a world's size.

    Nodes are the participants 0 to n-1; an undirected edge works both ways. Each splits its mass
    equally between itself and those its edges lead to. A function is called with the size, as
    networkx's own generators are.

    >>> import networkx
    >>> Digraph(networkx.star_graph).peers(0, 4, index=0).send  # star_graph(n) has n + 1 nodes
    Traceback (most recent call last):
    ValueError: Digraph(star_graph): a graph of 5 nodes for 4 participants; nodes must be 0 to 3
    >>> Digraph(networkx.cycle_graph).peers(0, 4, index=0).receive
    (1, 3)
    """

    source: Any

    def __repr__(self) -> str:
        if callable(self.source):
            return f"Digraph({getattr(self.source, '__qualname__', type(self.source).__name__)})"
        sizes = [f"{graph.number_of_nodes()} nodes" for graph in self._graphs(0)]
        return f"Digraph({', '.join(sizes)})"

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Equal shares along the edges that lead away."""
        graphs = self._graphs(size)
        graph = graphs[index % len(graphs)]
        if set(graph.nodes) != set(range(size)):
            raise ValueError(
                f"{self}: a graph of {graph.number_of_nodes()} nodes for {size} participants; "
                f"nodes must be 0 to {size - 1}"
            )
        out = tuple(graph.neighbors(rank))
        into = tuple(graph.predecessors(rank)) if graph.is_directed() else out
        share = 1 / (len(out) + 1)
        return Peers(tuple((to, share) for to in out), into, share)

    def period(self, size: int) -> int:
        """The number of graphs."""
        return len(self._graphs(size))

    def _graphs(self, size: int) -> Sequence[Any]:
        made = self.source(size) if callable(self.source) else self.source
        graphs = list(made) if isinstance(made, list | tuple) else [made]
        if not graphs or not all(hasattr(graph, "is_directed") for graph in graphs):
            raise ValueError(
                f"a graph is {made!r}, expected a networkx graph, a list of them, or a function "
                "of the number of participants that makes one"
            )
        return graphs


@final
@dataclass(frozen=True)
class Phases(Topology):
    """One graph for some exchanges, then another: ``((300, Complete()), (None, Exponential()))``.

    The last one stays, and has no number. Numbers count exchanges, which are steps, unless every
    second step or fewer sends (``overlap`` of 2 and more). The paper's AR/1P and 2P/1P (Table 3).

    >>> early = Phases(((2, Complete()), (None, Exponential())))
    >>> [len(early.peers(0, 4, index).send) for index in range(4)]
    [3, 3, 1, 1]
    """

    phases: tuple[tuple[int | None, Topology], ...]

    def __post_init__(self) -> None:
        """Refuse a schedule with gaps."""
        object.__setattr__(self, "phases", tuple(tuple(phase) for phase in self.phases))
        *early, (last, _) = self.phases or ((0, None),)
        counts = [count for count, _ in early]
        bad = [count for count in counts if type(count) is not int or count < 1]
        others = [g for _, g in self.phases if not isinstance(g, Topology)]
        if bad or others or last is not None:
            raise ValueError(
                f"phases={self.phases!r}, expected pairs of a number of exchanges and a Topology, "
                "the last with None for its number: ((300, Complete()), (None, Exponential()))"
            )

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Those of the phase that is on, whose own count of exchanges starts at 0."""
        graph, index = self._now(index)
        return graph.peers(rank, size, index)

    def period(self, size: int) -> int:
        """That of the last graph."""
        return self.phases[-1][1].period(size)

    def parts(self) -> tuple[Topology, ...]:
        """The graphs of all phases."""
        return tuple(graph for _, graph in self.phases)

    def is_mean(self, size: int, index: int) -> bool:
        """As the phase that is on says."""
        graph, index = self._now(index)
        return graph.is_mean(size, index)

    def _now(self, index: int) -> tuple[Topology, int]:
        for count, graph in self.phases:
            if count is None or index < count:
                return graph, index
            index -= count
        raise AssertionError("the last phase has no end")


@final
@dataclass(frozen=True)
class Symmetric(Topology):
    """``graph``, refused unless every share is returned: what D-PSGD needs.

    >>> Symmetric(Exponential()).peers(0, 8, index=0)
    Traceback (most recent call last):
    ValueError: Exponential(peers=1) at size 8: participant 0 gives 1 a share of 0.5 and gets 0...
    """

    graph: Topology

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Those of the graph, after a look at what the peers return."""
        peers = self.graph.peers(rank, size, index)
        for to, share in peers.send:
            back = dict(self.graph.peers(to, size, index).send).get(rank, 0)
            if back != share:
                raise ValueError(
                    f"{self.graph} at size {size}: participant {rank} gives {to} a share of "
                    f"{share} and gets {back}; d_psgd needs a symmetric graph, such as 'ring' or "
                    "'bipartite': use sgp for directed ones"
                )
        return peers

    def period(self, size: int) -> int:
        """That of the graph."""
        return self.graph.period(size)

    def parts(self) -> tuple[Topology, ...]:
        """Its parts, each of which must be symmetric."""
        return tuple(
            Symmetric(part) if part is not self.graph else self for part in self.graph.parts()
        )

    def is_mean(self, size: int, index: int) -> bool:
        """As the graph says."""
        return self.graph.is_mean(size, index)
