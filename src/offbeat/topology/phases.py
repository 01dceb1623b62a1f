"""Topologies composed of others: several in sequence, or one that must be symmetric."""

from dataclasses import dataclass
from typing import final

from offbeat.settings import check_settings
from offbeat.topology.graph import Peers, Topology


@final
@dataclass(frozen=True)
class Phases(Topology):
    """Runs topologies in sequence: ``((300, Complete()), (None, Exponential()))``.

    Each pair is a number of exchanges and the topology that they use; the last topology has no
    end, and None for its number. One exchange is one step, unless ``overlap`` is 2 or more: then
    it is ``overlap`` steps.

    Raises ``ValueError`` for anything else.

    Source: Assran et al. 2019, Table 3 (AR/1P-SGP and 2P/1P-SGP).

    >>> from offbeat import Complete, Exponential
    >>> early = Phases(((2, Complete()), (None, Exponential())))
    >>> [len(early.peers(0, 4, index).send) for index in range(4)]
    [3, 3, 1, 1]
    """

    phases: tuple[tuple[int | None, Topology], ...]

    def __post_init__(self) -> None:
        """Check the pairs, and keep lists of them as tuples."""
        if not _is_schedule(self.phases):
            raise ValueError(
                f"phases={self.phases!r}, expected pairs of a number of exchanges and a Topology, "
                "the last with None for its number: ((300, Complete()), (None, Exponential()))"
            )
        object.__setattr__(self, "phases", tuple(tuple(phase) for phase in self.phases))

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return the edges in the current phase, whose exchanges are counted from 0."""
        graph, index = self._now(index)
        return graph.peers(rank, size, index)

    def period(self, size: int) -> int:
        """Return the period of the last topology."""
        return self.phases[-1][1].period(size)

    def parts(self) -> tuple[Topology, ...]:
        """Return the topologies of all phases."""
        return tuple(graph for _, graph in self.phases)

    def is_mean(self, size: int, index: int) -> bool:
        """Return whether the current phase averages all participants in this exchange."""
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
    """Requires a topology to be symmetric, as D-PSGD does: ``P[i, j] == P[j, i]``.

    Raises ``ValueError`` in :meth:`peers` for an edge without an equal edge back.

    >>> from offbeat import Exponential
    >>> Symmetric(Exponential()).peers(0, 8, index=0)
    Traceback (most recent call last):
    ValueError: Exponential(peers=1) at size 8: participant 0 gives 1 a share of 0.5 and gets 0...
    """

    graph: Topology

    def __post_init__(self) -> None:
        """Check that ``graph`` is a topology."""
        check_settings(self)

    @property
    def is_fixed(self) -> bool:  # type: ignore[override]  # nobody writes it
        """Whether that of ``graph`` is."""
        return self.graph.is_fixed

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return the edges of ``graph``, after a check that every share is returned."""
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
        """Return the period of ``graph``."""
        return self.graph.period(size)

    def parts(self) -> tuple[Topology, ...]:
        """Return the parts of ``graph``, each of which must be symmetric."""
        return tuple(
            Symmetric(part) if part is not self.graph else self for part in self.graph.parts()
        )

    def is_mean(self, size: int, index: int) -> bool:
        """Return whether ``graph`` averages all participants in this exchange."""
        return self.graph.is_mean(size, index)


def _is_schedule(phases: object) -> bool:
    """Return whether these are pairs of a count and a topology, the last one without a count."""
    if not isinstance(phases, list | tuple) or not phases:
        return False
    if not all(isinstance(phase, list | tuple) and len(phase) == 2 for phase in phases):
        return False
    *early, last = (count for count, _ in phases)
    counted = all(type(count) is int and count > 0 for count in early)
    return counted and last is None and all(isinstance(g, Topology) for _, g in phases)
