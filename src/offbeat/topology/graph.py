"""Communication graphs of gossip, which may change from one exchange to the next."""

from abc import ABC, abstractmethod
from math import isclose
from typing import ClassVar, NamedTuple

import numpy as np


class Peers(NamedTuple):
    """Lists the edges of one participant in one exchange.

    ``send`` holds pairs (receiver, share of the mass that it gets), ``receive`` the senders, and
    ``keep`` the share that the participant keeps. ``keep`` and the shares sent sum to 1, so that
    the mixing matrix is column-stochastic.
    """

    send: tuple[tuple[int, float], ...]
    receive: tuple[int, ...]
    keep: float


class Topology(ABC):
    """Defines a sequence of directed graphs; every participant computes it by itself.

    Subclasses define :meth:`peers` and :meth:`period`; :func:`validate` checks the result.

    >>> class Star(Topology):  # all exchange with participant 0: irregular, weights vary
    ...     def peers(self, rank, size, index):
    ...         others = tuple(range(1, size))
    ...         if rank == 0:
    ...             return Peers(tuple((i, 1 / size) for i in others), others, 1 / size)
    ...         return Peers(((0, 0.5),), (0,), 0.5)
    ...
    ...     def period(self, size):
    ...         return 1
    >>> validate(Star(), 4)
    >>> keeps_weights(Star(), 4)
    False
    """

    # Whether the repr, which ranks compare, says all: no function of the user's makes the graphs.
    is_fixed: ClassVar[bool] = False

    def __repr__(self) -> str:
        # Without an address: ranks compare the repr of their algorithms.
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    @abstractmethod
    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return the edges of ``rank`` among ``size`` participants in exchange number ``index``."""

    @abstractmethod
    def period(self, size: int) -> int:
        """Return the number of exchanges after which the graphs repeat."""

    def parts(self) -> tuple["Topology", ...]:
        """Return the topologies that this one consists of; each is validated by itself."""
        return (self,)

    def is_mean(self, size: int, index: int) -> bool:
        """Return whether exchange ``index`` averages all participants: then it is an all-reduce."""
        return False


class Edges(NamedTuple):
    """Holds the edges of one exchange as arrays, each participant's own share among them.

    ``to`` and ``source`` are participants, int64 (edges,); ``share`` float64 (edges,).
    """

    to: np.ndarray
    source: np.ndarray
    share: np.ndarray

    @classmethod
    def of(cls, topology: Topology, size: int, index: int) -> "Edges":
        """Ask all participants for the edges of exchange ``index``."""
        graph = [topology.peers(rank, size, index) for rank in range(size)]
        own = [(rank, rank, peers.keep) for rank, peers in enumerate(graph)]
        sent = [(to, rank, p) for rank, peers in enumerate(graph) for to, p in peers.send]
        to, source, share = zip(*own, *sent, strict=True)
        return cls(np.array(to), np.array(source), np.array(share, float))

    def received(self, x: np.ndarray) -> np.ndarray:
        """Return P x for the mixing matrix P; x is (size,)."""
        return np.bincount(self.to, self.share * x[self.source], len(x))


def mixing_matrix(topology: Topology, size: int, index: int) -> np.ndarray:
    """Return the mixing matrix P of one exchange, of shape (size, size) and column-stochastic.

    ``P[i, j]`` is the share of participant j's mass that goes to i.

    >>> from offbeat import Ring
    >>> mixing_matrix(Ring(), 2, 0)
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    edges, matrix = Edges.of(topology, size, index), np.zeros((size, size))
    np.add.at(matrix, (edges.to, edges.source), edges.share)
    return matrix


def keeps_weights(topology: Topology, size: int) -> bool:
    """Return whether every push-sum weight stays 1: the rows of all mixing matrices sum to 1.

    >>> from offbeat import Ring
    >>> keeps_weights(Ring(), 4)
    True
    """
    ones = np.ones(size)
    rows = [edges.received(ones) for edges in edges_of_periods(topology, size)]
    return bool(np.allclose(rows, 1.0, rtol=0, atol=1e-12))


def smallest_weight(topology: Topology, size: int, overlap: int = 0) -> float:
    """Return the smallest push-sum weight that a participant comes to, of weights that begin at 1.

    Within ten exchanges for each participant, 1000 at most, on each part by itself. With
    ``overlap`` what is in flight is missing from a weight.

    >>> from offbeat import Ring
    >>> smallest_weight(Ring(), 4), round(smallest_weight(Ring(), 4, overlap=1), 2)
    (1.0, 0.33)
    """
    return min(_smallest_weight(part, size, overlap) for part in topology.parts())


def _smallest_weight(topology: Topology, size: int, overlap: int) -> float:
    period = topology.period(size)
    graphs = [Edges.of(topology, size, index) for index in range(period)]
    weights, in_flight, low = np.ones(size), np.zeros(size), 1.0
    for index in range(max(2 * period, min(10 * size, 1000))):
        edges = graphs[index % period]
        kept = edges.share[:size] * weights
        sent = edges.received(weights) - kept
        weights, in_flight = kept + (in_flight if overlap else sent), sent
        low = min(low, float(weights.min()))
    return low


def edges_of_periods(topology: Topology, size: int) -> list[Edges]:
    """Return the edges of one period of each part, in order."""
    return [Edges.of(part, size, index) for part, index in exchanges_of_periods(topology, size)]


def exchanges_of_periods(topology: Topology, size: int) -> list[tuple[Topology, int]]:
    """Return each part with the index of each exchange of its period, in order."""
    return [(part, index) for part in topology.parts() for index in range(part.period(size))]


def neighbours(topology: Topology, rank: int, size: int) -> set[int]:
    """Return all participants to which ``rank`` sends, or from which it receives, in any exchange.

    >>> from offbeat import Exponential
    >>> sorted(neighbours(Exponential(), 0, 16))
    [1, 2, 4, 8, 12, 14, 15]
    """
    rounds = [part.peers(rank, size, index) for part, index in exchanges_of_periods(topology, size)]
    sent = {to for peers in rounds for to, _ in peers.send}
    return sent.union(*(peers.receive for peers in rounds))


def validate(topology: Topology, size: int) -> None:
    """Check that push-sum on these graphs conserves mass and converges to the mean.

    Raises ``ValueError`` for a self-edge, a peer outside the world or listed twice, shares that
    are not positive or do not sum to 1, a send without its receive, and a period whose union of
    graphs is not strongly connected.
    """
    for part in topology.parts():
        _validate_part(part, size)


def _validate_part(topology: Topology, size: int) -> None:
    for index in range(topology.period(size)):
        graph = [topology.peers(rank, size, index) for rank in range(size)]
        for rank, peers in enumerate(graph):
            _check_shares(rank, peers, size, f"{topology} at size {size}, exchange {index}")
        _check_pairs(graph, f"{topology} at size {size}, exchange {index}")
    graphs = [Edges.of(topology, size, index) for index in range(topology.period(size))]
    to = np.concatenate([np.arange(0), *(edges.to for edges in graphs)])
    source = np.concatenate([np.arange(0), *(edges.source for edges in graphs)])
    after, before = _reached(to, source, size), _reached(source, to, size)
    if not (after & before).all():
        target, start = (int(np.argmin(after)), 0) if before.all() else (0, int(np.argmin(before)))
        raise ValueError(
            f"{topology} at size {size}: participant {target} is not reachable from participant "
            f"{start}, so the replicas cannot agree; add edges until the union over one period is "
            "strongly connected"
        )


def _reached(to: np.ndarray, source: np.ndarray, size: int) -> np.ndarray:
    """Return which participants a path along the edges connects to the first one."""
    reached: np.ndarray = np.arange(size) == 0
    while True:
        wider: np.ndarray = reached | (np.bincount(to, reached[source], size) > 0)
        if np.array_equal(wider, reached):
            return reached
        reached = wider


def _check_shares(rank: int, peers: Peers, size: int, where: str) -> None:
    receivers = [receiver for receiver, _ in peers.send]
    for peer in (*receivers, *peers.receive):
        if peer == rank:
            raise ValueError(
                f"{where}: participant {rank} lists itself as a peer; use `keep` for its own share"
            )
        if not 0 <= peer < size:
            raise ValueError(
                f"{where}: participant {rank} lists peer {peer}, expected 0..{size - 1}"
            )
    if len(set(receivers)) < len(receivers) or len(set(peers.receive)) < len(peers.receive):
        raise ValueError(f"{where}: participant {rank} lists a peer twice; merge the two shares")
    shares = (peers.keep, *(share for _, share in peers.send))
    if not isclose(sum(shares), 1.0, abs_tol=1e-12) or min(shares) <= 0:
        raise ValueError(
            f"{where}: participant {rank} splits its mass into {shares} (its own share first); "
            "expected positive shares with a sum of 1, so that no mass is lost"
        )


def _check_pairs(graph: list[Peers], where: str) -> None:
    sent = {(rank, to) for rank, peers in enumerate(graph) for to, _ in peers.send}
    expected = {(source, rank) for rank, peers in enumerate(graph) for source in peers.receive}
    for source, to in sorted(sent ^ expected):
        fault = "no receive for it" if (source, to) in sent else "no send for it"
        raise ValueError(f"{where}: the edge {source} -> {to} has {fault}; list it on both sides")
