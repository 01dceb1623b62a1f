"""Graph families from the papers: exponential, bipartite, ring, complete."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

from offbeat.settings import at_least, check_values
from offbeat.topology.graph import Peers, Topology


@final
@dataclass(frozen=True)
class Exponential(Topology):
    """Selects ``peers`` receivers at distances of powers of two: the directed exponential graph.

    In exchange number i participant r sends equal shares to the participants r + h (mod n) with
    ``h = 2^((i * peers + j) mod ceil(log2 n))`` for j = 0, ..., ``peers`` - 1. With one peer and n
    a power of two the replicas agree exactly after each period of exchanges without training.
    Sends ``peers`` models per participant and exchange.

    Raises ``ValueError`` for ``peers`` below 1, and in :meth:`peers` for more than ceil(log2 n).

    Source: Assran et al. 2019, section 3 and appendix A.

    >>> [Exponential().peers(0, 8, index).send for index in range(3)]
    [((1, 0.5),), ((2, 0.5),), ((4, 0.5),)]
    >>> [to for to, _ in Exponential(peers=2).peers(0, 8, index=1).send]
    [4, 1]
    """

    is_fixed: ClassVar[bool] = True

    number: int = 1

    def __init__(self, peers: Annotated[int, at_least(1)] = 1) -> None:
        """Check the number of peers; the upper bound depends on the world."""
        check_values(Exponential.__init__, {"peers": peers})
        object.__setattr__(self, "number", peers)

    def __repr__(self) -> str:
        return f"Exponential(peers={self.number})"

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return equal shares for the receivers and the participant itself."""
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
        """Return the number of exchanges after which the distances repeat."""
        powers = max(1, (size - 1).bit_length())
        return powers // math.gcd(powers, self.number)


@final
@dataclass(frozen=True)
class BipartiteExponential(Topology):
    """Pairs every even participant with an odd one: the undirected bipartite exponential graph.

    The distance of a pair is 1, 3, 5, 9, 17, ... in successive exchanges. Both sides of a pair
    get its average, and every push-sum weight stays 1. Sends one model per participant and
    exchange.

    Raises ``ValueError`` in :meth:`peers` for an odd number of participants.

    Source: Assran et al. 2019, appendix A.

    >>> [BipartiteExponential().peers(0, 8, index).receive for index in range(3)]
    [(1,), (3,), (5,)]
    """

    is_fixed: ClassVar[bool] = True

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return a share of one half for the partner."""
        if size % 2:
            raise ValueError(
                f"{self} at size {size}: pairs need an even number of participants; use Ring()"
            )
        power = index % self.period(size)
        distance = 2**power + 1 if power else 1
        partner = (rank + (distance if rank % 2 == 0 else -distance)) % size
        return Peers(((partner, 0.5),), (partner,), 0.5)

    def period(self, size: int) -> int:
        """Return the number of distances below ``size``."""
        return max(1, (size - 2).bit_length())


@final
@dataclass(frozen=True)
class Ring(Topology):
    """Connects neighbours: equal shares for both of them and the participant itself.

    Sends two models per participant and exchange (one between two participants). Mixes slowly in
    large worlds: one exchange multiplies the consensus error by about ``1 - 13 / n^2``.

    >>> Ring().peers(0, 4, index=0)
    Peers(send=((3, 0.333...), (1, 0.333...)), receive=(1, 3), keep=0.333...)
    """

    is_fixed: ClassVar[bool] = True

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return equal shares for the neighbours and the participant itself."""
        near = tuple(dict.fromkeys(((rank - 1) % size, (rank + 1) % size)))
        share = 1 / (len(near) + 1)
        return Peers(tuple((peer, share) for peer in near), near[::-1], share)

    def period(self, size: int) -> int:
        """Return 1: the ring does not change."""
        return 1


@final
@dataclass(frozen=True)
class Complete(Topology):
    """Connects all participants: every exchange is their mean.

    Implemented as an all-reduce, which sends 2 (n-1)/n of the model's bytes per participant and
    exchange; with 16-bit messages n-1 models.

    >>> Complete().peers(1, 3, index=0)
    Peers(send=((0, 0.333...), (2, 0.333...)), receive=(0, 2), keep=0.333...)
    """

    is_fixed: ClassVar[bool] = True

    def peers(self, rank: int, size: int, index: int) -> Peers:
        """Return a share of 1/n for every participant."""
        others = tuple(other for other in range(size) if other != rank)
        return Peers(tuple((other, 1 / size) for other in others), others, 1 / size)

    def period(self, size: int) -> int:
        """Return 1: the graph does not change."""
        return 1

    def is_mean(self, size: int, index: int) -> bool:
        """Return True: an exchange averages all participants exactly."""
        return True
