"""How bytes, connections and serial messages of each method grow with the ranks."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import offbeat
from offbeat.methods.adasum.method import choose, gram_bytes, halving_bytes
from offbeat.methods.adasum.participants import SMALL
from offbeat.platform.peers import lazy_peers
from offbeat.topology.graph import Topology, neighbours

EVERY = 8  # steps between two exchanges of the methods that have an interval
LOCAL = 2  # ranks of a node, of the methods that have nodes
TENSORS, BYTES = 8, 1_052_672  # of the model of the bench
Sockets = Callable[[int], float]


def _products(n: int) -> float:
    """The inner products of adasum, in models."""
    kind = choose("auto", n, TENSORS, BYTES, BYTES)
    return (gram_bytes if kind == "gram" else halving_bytes)(n, TENSORS) / BYTES


def _adasum_hops(n: int) -> int:
    if choose("auto", n, TENSORS, BYTES, BYTES) == "gram":
        is_small = gram_bytes(n, TENSORS) <= SMALL  # through the first rank
        return 2 * (n - 1) + (2 if is_small else 2 * (n - 1))
    levels = (n - 1).bit_length()
    return 2 * levels + levels * (levels + 1) // 2


NAMES = {"l": LOCAL, "every": EVERY, "products": _products, "adasum_hops": _adasum_hops}


@dataclass(frozen=True)
class Law:
    """Of one method; formulas are of the numbers of ranks n, of nodes p and of ranks l on a node.

    Attributes:
        formula: what a rank sends per step, in models of 4 bytes per parameter.
        messages: those that follow one another in an exchange, as a formula.
        sockets: of a rank, the mean over ranks, listeners among them.
        tolerance: relative, of measured bytes against the formula.
        local: ranks per node.
    """

    formula: str
    messages: str
    sockets: Sockets
    tolerance: float = 0.02
    local: int = 1

    def bytes(self, n: int) -> float:
        return float(eval(self.formula, NAMES | {"n": n, "p": n // LOCAL}))

    def hops(self, n: int) -> int:
        return int(eval(self.messages, NAMES | {"n": n, "p": n // LOCAL}))


def _connected(n: int, more: Callable[[int, int], Collection[int]] | None = None) -> float:
    """The sockets of a group that connects collectives' peers and ``more``, per rank."""
    sets = [lazy_peers(rank, n, 1) | {*(more(rank, n) if more else ())} for rank in range(n)]
    return 1 + sum(map(len, sets)) / n


def _gossip(topology: Topology) -> Sockets:
    return lambda n: _connected(n, lambda rank, n: neighbours(topology, rank, n))


def _graph(topology: Topology) -> Sockets:
    """Of groups for collectives and for gossip."""
    return lambda n: _connected(n) + _gossip(topology)(n)


def _ring(n: int) -> float:
    return 2 * _connected(n)


def _mesh(n: int) -> float:
    return _connected(n) + n


def _halves(n: int) -> float:
    others = lambda rank, n: [peer for peer in range(n) if (peer - rank) % 2]  # noqa: E731
    return _connected(n) + _connected(n, others)


def _nodes(between: Sockets) -> Sockets:
    """Inside a node there are groups for means of gradients and of models."""
    return lambda n: _connected(n) + between(n // LOCAL) + _ring(LOCAL)


EXPONENTIAL = offbeat.Exponential()
SUM, AROUND = "2 * (n-1) / n", "2 * (n-1)"  # an all-reduce
MEAN = Law(f"{SUM} / every", AROUND, _ring)
ONE_PEER = Law("1", "1", _graph(EXPONENTIAL))
# Of 4,096 entries 64 are sent, with 2 bits of value, 12 of index and a share of a scale.
SPARSE_LOCO = Law("0.00708 * (n-1) / every", "n-1", _ring, tolerance=0.1)
LAWS = {
    "ddp": Law(SUM, AROUND, _ring),
    "sgp": ONE_PEER,
    "sgp(overlap=1)": ONE_PEER,
    # Of the average: weights are gathered, then numerators are summed.
    f"sgp(outer='SGD(lr=1,momentum=0.6)',outer_every={EVERY})": Law(
        f"1 + {SUM} / every", "3 * (n-1)", _graph(EXPONENTIAL)
    ),
    "sgp(within='local')": Law(
        "3 * (l-1) / l + 1 / l", "3 * (l-1) + 1", _nodes(_gossip(EXPONENTIAL)), local=LOCAL
    ),
    f"daso(every={EVERY})": Law(
        "2 * (l-1) / l * (1 + 1 / every) + 2 * (p-1) / p / (l * every)",
        "2 * (p-1) + 2 * (l-1)", _nodes(lambda p: p), local=LOCAL,
    ),
    "d_psgd": Law("2", "2", _graph(offbeat.Ring())),
    f"local_sgd(every={EVERY})": MEAN,
    f"diloco(every={EVERY})": MEAN,
    f"diloco(every={EVERY},wire='int8')": Law("(n-1) / (2 * n) / every", AROUND, _mesh, 0.1),
    f"sparse_loco(every={EVERY})": SPARSE_LOCO,
    # From 1 / density ranks on all entries are averaged, which takes no more bytes.
    **{
        f"{method}(density={density})": Law(
            f"2 * (n-1) * min({density}, 1 / n)",
            f"n-1 if n * {density} < 1 else 2 * (n-1)", _ring,
        )
        for method, density in (("lags", 0.01), ("lags", 0.1), ("slgs", 0.01))
    },
    "adasum": Law(f"{SUM} + products(n)", "adasum_hops(n)", _mesh, 0.05),
    "ad_psgd": Law("1", "2", _halves, 1.0),
}  # fmt: skip
