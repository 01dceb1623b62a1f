"""The cost of an exchange, and the sparsity that hides it (Shi et al. 2020, section 5)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INDEX = 4  # bytes of an index in a message


@dataclass(frozen=True)
class LinkCost:
    r"""Models the cost of an exchange between ``size`` ranks: :math:`t = a + b \cdot bytes`.

    ``latency`` a in seconds per message, ``per_byte`` b in seconds per byte that a rank sends.

    >>> LinkCost(4, latency=1e-3, per_byte=1e-6).all_gather(100)
    0.0013
    """

    size: int
    latency: float
    per_byte: float

    def all_gather(self, nbytes: float) -> float:
        """Return the seconds of an all-gather of ``nbytes`` from each rank."""
        return self.latency + self.per_byte * (self.size - 1) * nbytes

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of ``nbytes``."""
        return self.latency + self.per_byte * 2 * (self.size - 1) / self.size * nbytes

    @classmethod
    def fit(cls, size: int, samples: Sequence[tuple[float, float]]) -> "LinkCost":
        """Fit the cost to measured all-gathers, pairs of (bytes of each rank, seconds).

        >>> LinkCost.fit(3, [(0, 0.5), (100, 1.5)])
        LinkCost(size=3, latency=0.5, per_byte=0.005)
        """
        (small, quick), (large, slow) = min(samples), max(samples)
        per_byte = max(0.0, slow - quick) / (size - 1) / (large - small)
        return cls(size, max(0.0, quick - per_byte * (size - 1) * small), per_byte)


def is_cheaper_dense(numel: int, k: int, itemsize: int, size: int, grad_itemsize: int = 0) -> bool:
    r"""Return whether an all-reduce of all entries sends no more than an all-gather of ``k``.

    .. math:: 2 \tfrac{P-1}{P} d\, b_{grad} \le (P-1)\, k\, (b_{value} + 4)

    Break-even lies at :math:`c = d/k = P` for float32 values and int32 indices.

    >>> is_cheaper_dense(100, k=25, itemsize=4, size=4), is_cheaper_dense(100, 24, 4, 4)
    (True, False)
    """
    return 2 * numel * (grad_itemsize or itemsize) <= size * k * (itemsize + INDEX)


def adaptive_ratio(
    numel: int,
    link: LinkCost,
    *,
    compute: float,
    select: float,
    limit: float,
    itemsize: int = 4,
    dense_itemsize: int = 4,
) -> float:
    r"""Return the compression ratio that hides a layer's exchange behind the next backward.

    .. math:: c = \min\bigl(c_u,\ \min\{c : t_{comm}(c) + t_{spar} \le t_{comp}\}\bigr)

    ``compute`` is t_comp of the layer that comes next in backward, ``select`` is t_spar, both in
    seconds; ``limit`` is :math:`c_u`. ``itemsize`` and ``dense_itemsize`` are the bytes of a value
    in a sparse and in a dense message. 1 where all can be sent in that time, which needs no
    selection. Eq. 18; printed there with a max, which would make the upper bound a lower one.

    >>> link = LinkCost(4, latency=0.0, per_byte=1e-9)
    >>> adaptive_ratio(10**6, link, compute=1e-2, select=0.0, limit=1000)
    1.0
    >>> round(adaptive_ratio(10**6, link, compute=1e-3, select=0.0, limit=1000))
    24
    >>> adaptive_ratio(10**6, link, compute=0.0, select=0.0, limit=1000)
    1000
    """
    if link.all_reduce(numel * dense_itemsize) <= compute:
        return 1.0
    left = compute - select - link.latency
    full = link.per_byte * (link.size - 1) * numel * (itemsize + INDEX)  # with an index for each
    return min(limit, max(1.0, full / left)) if left > 0 else limit


def exposed_seconds(layers: Iterable[tuple[float, float]]) -> float:
    r"""Return the seconds by which the exchange of the ``layers`` outlasts their backward.

    .. math:: f_l = \max(f_{l-1}, \sum_{j \le l} t_j) + t_{comm,l}

    Pairs (seconds until the gradient is there, seconds of its exchange) in the order of backward;
    one exchange after the other, each from when its gradient is there. Shi et al. 2020, figure 1.

    >>> exposed_seconds([(1.0, 3.0), (1.0, 2.0)])
    4.0
    """
    now = free = 0.0
    for compute, exchange in layers:
        now += compute
        free = max(free, now) + exchange
    return max(0.0, free - now)


def max_speedup(forward: float, backward: float, exchange: float) -> float:
    r"""Return the largest possible speed-up of a step by overlap.

    .. math:: S_{max} = 1 + \frac{1}{t_f / \min(t_c, t_b) + \max(r, 1/r)}, \quad r = t_c / t_b

    Seconds of forward :math:`t_f`, backward :math:`t_b` and communication :math:`t_c`. Eq. 19.

    >>> max_speedup(forward=1.0, backward=1.0, exchange=1.0)
    1.5
    """
    hidden = min(exchange, backward)
    return speedup(forward, backward, exchange, hidden)


def speedup(forward: float, backward: float, exchange: float, hidden: float) -> float:
    """Return the speed-up when ``hidden`` seconds of the exchange overlap with backward.

    >>> speedup(forward=1.0, backward=2.0, exchange=2.0, hidden=1.0)
    1.25
    """
    total = forward + backward + exchange
    return total / (total - hidden) if 0 < hidden < total else 1.0


def warm_density(density: float, step: int, warmup: int) -> float:
    """Return a density that falls from 1/4 by factors of four to ``density`` in ``warmup`` steps.

    Lin et al. 2018, section 3.3: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %.

    >>> [warm_density(0.001, step, warmup=8) for step in (0, 2, 4, 6, 8)]
    [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    """
    if step >= warmup:
        return density
    stages = max(1, math.ceil(math.log(density, 0.25)) - 1)
    return max(density, float(0.25 ** (1 + step * stages // warmup)))
