"""The graph families of the papers."""

import math
from dataclasses import dataclass
from typing import final

from offbeat.topology.graph import Peers, Topology


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
