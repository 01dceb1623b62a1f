"""How bytes, connections, serial messages and memory of each method grow with the ranks."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import offbeat
from offbeat.methods.adasum.method import choose, gram_bytes, halving_bytes
from offbeat.methods.adasum.participants import SMALL
from offbeat.platform.process_group import collective_peers
from offbeat.topology.graph import Topology, neighbours

EVERY = 8  # steps between two exchanges of the methods that have an interval
DENSITY, DENSE = 0.01, 0.1  # of entries sent by lags
KEPT = 64 / 4096  # of entries sent by sparse_loco
WORD = 2 / 8 + 12 / 8 + 4 / 64  # bytes of an entry of sparse_loco: value, index, share of a scale


@dataclass(frozen=True)
class Law:
    """Of one method, as functions of the number of ranks.

    Attributes:
        bytes: sent per step and rank, in models of 4 bytes per parameter.
        formula: the same, to read.
        sockets: of a rank, the mean over ranks, listeners among them.
        hops: messages that follow one another in an exchange.
        tolerance: relative, of measured bytes against ``bytes``.
        local: ranks per node.
    """

    bytes: Callable[[int], float]
    formula: str
    sockets: Callable[[int], float]
    hops: Callable[[int], float]
    tolerance: float = 0.02
    local: int = 1


def _connected(n: int, more: Callable[[int, int], Collection[int]] | None) -> float:
    """Return the sockets of a group that connects collectives' peers and ``more``, per rank."""
    sets = [collective_peers(rank, n) | {*(more(rank, n) if more else ())} for rank in range(n)]
    return 1 + sum(map(len, sets)) / n


def _ring(n: int) -> float:
    return 2 * _connected(n, None)


def _mesh(n: int) -> float:
    return _connected(n, None) + n


def _halves(n: int) -> float:
    others = lambda rank, n: [peer for peer in range(n) if (peer - rank) % 2]  # noqa: E731
    return _connected(n, None) + _connected(n, others)


def _all_reduce(n: int) -> float:
    return 2 * (n - 1) / n


def _averaged(
    share: float, formula: str, sockets: Callable[[int], float] = _ring, tolerance: float = 0.02
) -> Law:
    """All-reduces of a share of the model in each step."""
    return Law(lambda n: share * _all_reduce(n), formula, sockets, lambda n: 2 * (n - 1), tolerance)


def _gossip(topology: Topology, peers: int) -> Law:
    """A model to each of so many peers, beside a group for collectives."""
    return Law(lambda n: peers, f"{peers}", _graph(topology), lambda n: peers)


def _graph(topology: Topology) -> Callable[[int], float]:
    def sockets(n: int) -> float:
        return _connected(n, None) + _connected(n, lambda rank, n: neighbours(topology, rank, n))

    return sockets


def _top_k(density: float) -> Law:
    """From 1 / density ranks on all entries are averaged, which takes no more bytes."""
    return Law(
        lambda n: 2 * (n - 1) * min(density, 1 / n),
        "2 (n-1) min(density, 1/n)",
        _ring,
        lambda n: n - 1 if n * density < 1 else 2 * (n - 1),
    )


# Of nodes with two ranks: a mean of gradients inside, and one slice of the model for each rank.
LOCAL = 2
INSIDE = 2 * _connected(LOCAL, None)  # sockets: a group for the means, one for the models


def _gossip_of_nodes(n: int) -> float:
    gossip = _connected(n // LOCAL, lambda rank, n: neighbours(offbeat.Exponential(), rank, n))
    return _connected(n, None) + gossip + INSIDE


def _daso(n: int) -> float:
    between = _all_reduce(n // LOCAL) / LOCAL  # by one rank of each node in turn
    return _all_reduce(LOCAL) * (1 + 1 / EVERY) + between / EVERY


# Inner products of adasum: the model of the bench has 8 tensors, of 1,052,672 bytes in all.
TENSORS, BYTES = 8, 1_052_672


def _adasum(n: int) -> float:
    kind = choose("auto", n, TENSORS, BYTES, BYTES)
    products = gram_bytes if kind == "gram" else halving_bytes
    return _all_reduce(n) + products(n, TENSORS) / BYTES


def _adasum_hops(n: int) -> float:
    if choose("auto", n, TENSORS, BYTES, BYTES) == "gram":
        is_small = gram_bytes(n, TENSORS) <= SMALL  # through the first rank
        return 2 * (n - 1) + (2 if is_small else 2 * (n - 1))
    levels = (n - 1).bit_length()
    return 2 * levels + levels * (levels + 1) // 2


LAWS = {
    "ddp": _averaged(1, "2 (n-1)/n"),
    "sgp": _gossip(offbeat.Exponential(), 1),
    "sgp(overlap=1)": _gossip(offbeat.Exponential(), 1),
    f"sgp(outer='SGD(lr=1,momentum=0.6)',outer_every={EVERY})": Law(
        lambda n: 1 + _all_reduce(n) / EVERY,
        "1 + 2 (n-1)/n / every",
        _graph(offbeat.Exponential()),
        lambda n: 3 * (n - 1),  # of the average: weights are gathered, then numerators are summed
    ),
    "sgp(within='local')": Law(
        lambda n: 3 * (LOCAL - 1) / LOCAL + 1 / LOCAL,
        "3 (l-1)/l + 1/l with l ranks on a node, l = 2",
        _gossip_of_nodes,
        lambda n: 3 * (LOCAL - 1) + 1,
        local=LOCAL,
    ),
    f"daso(every={EVERY})": Law(
        _daso,
        "2 (l-1)/l (1 + 1/every) + 2 (p-1)/p / (l every) with p = n/l nodes, l = 2",
        lambda n: _connected(n, None) + n // LOCAL + INSIDE,
        lambda n: 2 * (n // LOCAL - 1) + 2 * (LOCAL - 1),
        local=LOCAL,
    ),
    "d_psgd": _gossip(offbeat.Ring(), 2),
    f"local_sgd(every={EVERY})": _averaged(1 / EVERY, "2 (n-1)/n / every"),
    f"diloco(every={EVERY})": _averaged(1 / EVERY, "2 (n-1)/n / every"),
    f"diloco(every={EVERY},wire='int8')": _averaged(1 / 4 / EVERY, "(n-1)/2n / every", _mesh, 0.1),
    f"sparse_loco(every={EVERY})": Law(
        lambda n: (n - 1) * KEPT * WORD / 4 / EVERY,
        "0.007 (n-1) / every",
        _ring,
        lambda n: n - 1,
        0.1,
    ),
    **{f"lags(density={density})": _top_k(density) for density in (DENSITY, DENSE)},
    f"slgs(density={DENSITY})": _top_k(DENSITY),
    "adasum": Law(
        _adasum,
        "2 (n-1)/n, and 8 n^2 (n-1) bytes a layer, from 16 ranks on 16 l (l+1) with l = log2 n",
        _mesh,
        _adasum_hops,
        0.05,
    ),
    "ad_psgd": Law(lambda n: 1, "at most 1", _halves, lambda n: 2, 1.0),
}
