"""Topologies made of others: one after another in time, or checked for symmetry."""

from dataclasses import dataclass
from typing import final

from offbeat.topology.graph import Peers, Topology


@final
@dataclass(frozen=True)
class Phases(Topology):
    """One graph for some exchanges, then another: ``((300, Complete()), (None, Exponential()))``.

    The last one stays, and has no number. Numbers count exchanges, which are steps, unless every
    second step or fewer sends (``overlap`` of 2 and more). The paper's AR/1P and 2P/1P (Table 3).

    >>> from offbeat import Complete, Exponential
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

    >>> from offbeat import Exponential
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
