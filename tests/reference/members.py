"""Methods of ranks that come and go: what each keeps, and how the ranks at hand exchange.

Rows are kept by rank. A method's ``exchange`` gets the rows of all members after the optimizer's
step k, and returns them after the exchange; ``lose`` and ``join`` come before it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reference.adasum import combine_layers
from reference.daso import eq_1
from reference.lags import sent_of, top_k
from reference.noloco import pairs
from reference.participants import Array, Gradient
from reference.sgd import SGD
from reference.sparse_loco import _compress

Rows = dict[int, Array]
LAYERS = (6, 3)


@dataclass
class Method:
    """Exchanges nothing: each subclass overrides what it does."""

    start: Array

    def gradients(self, g: Rows) -> Rows:
        """Combine the gradients of the members."""
        return g

    def exchange(self, z: Rows, k: int) -> Rows:
        """Combine the parameters of the members after step k."""
        return z

    def lose(self, ranks: Collection[int]) -> None:
        """Go on without these."""

    def leave(self, rank: int, z: Rows) -> Rows:
        """Let one go between two steps; what is in flight is merged."""
        self.lose([rank])
        return {other: row for other, row in z.items() if other != rank}

    def join(self, rank: int, donor: int, z: Rows) -> Rows:
        """Let one more in, which has the donor's parameters; before the exchange of the step."""
        return z | {rank: z[donor].copy()}


def mean(rows: Rows) -> Array:
    return np.asarray(np.mean([rows[rank] for rank in sorted(rows)], axis=0), np.float64)


def all_get(value: Array, rows: Rows) -> Rows:
    return {rank: value.copy() for rank in rows}


class Ddp(Method):
    def gradients(self, g: Rows) -> Rows:
        return all_get(mean(g), g)


@dataclass
class Lags(Method):
    density: float = 0.34
    residual: Rows = field(default_factory=dict)

    def gradients(self, g: Rows) -> Rows:
        acc = {rank: self.residual.get(rank, 0) + g[rank] for rank in g}
        sent = {rank: np.zeros_like(each) for rank, each in acc.items()}
        begin = 0
        for size in LAYERS:
            layer, count = slice(begin, begin + size), sent_of(size, self.density, len(g))
            for rank in acc:
                sent[rank][layer] = top_k(acc[rank][layer], count)
            begin += size
        self.residual = {rank: acc[rank] - sent[rank] for rank in acc}
        return all_get(mean(sent), g)

    def lose(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.residual.pop(rank, None)

    def leave(self, rank: int, z: Rows) -> Rows:
        share = self.residual[rank] / (len(z) - 1)
        self.residual = {other: own + share for other, own in self.residual.items()}
        return super().leave(rank, z)


@dataclass
class LocalSgd(Method):
    every: int = 2

    def exchange(self, z: Rows, k: int) -> Rows:
        return all_get(mean(z), z) if (k + 1) % self.every == 0 else z


@dataclass
class Adasum(Method):
    every: int = 1

    def __post_init__(self) -> None:
        self.anchor = self.start

    def exchange(self, z: Rows, k: int) -> Rows:
        if (k + 1) % self.every:
            return z
        updates = np.stack([z[rank] - self.anchor for rank in sorted(z)])
        self.anchor = self.anchor + combine_layers(updates, LAYERS)
        return all_get(self.anchor, z)


@dataclass
class Diloco(Method):
    """As ``reference.diloco``; what is in flight is lost, or merged early."""

    every: int = 2
    fragments: Sequence[slice] = (slice(None),)
    delay: int = 0
    mixing: float = 0.0

    def __post_init__(self) -> None:
        self.outer = SGD(0.7, 0.9, nesterov=True)
        self.theta, self.velocity = self.start.copy(), np.zeros_like(self.start)
        self.sent: dict[int, Array] = {}

    def delta(self, z: Rows, part: slice) -> Array:
        return self.theta[part] - mean(z)[part]

    def receive(self, z: Rows, p: int) -> Rows:
        part, delta = self.fragments[p], self.sent.pop(p)
        step = self.outer.step(self.theta[part], delta, self.velocity[part])
        self.theta[part], self.velocity[part] = step
        z = {rank: row.copy() for rank, row in z.items()}
        for row in z.values():
            row[part] = self.mixing * row[part] + (1 - self.mixing) * self.theta[part]
        return z

    def exchange(self, z: Rows, k: int) -> Rows:
        t = k + 1
        for p, part in enumerate(self.fragments):
            turn = p * self.every // len(self.fragments)
            if p in self.sent and (t - self.delay - turn) % self.every == 0:
                z = self.receive(z, p)
            if (t - turn) % self.every == 0:
                self.sent[p] = self.delta(z, part)
                z = self.receive(z, p) if self.delay == 0 else z
        return z

    def lose(self, ranks: Collection[int]) -> None:
        self.sent = {}

    def merged(self, z: Rows) -> Rows:
        for p in sorted(self.sent):
            z = self.receive(z, p)
        return z

    def leave(self, rank: int, z: Rows) -> Rows:
        return super().leave(rank, self.merged(z))

    def join(self, rank: int, donor: int, z: Rows) -> Rows:
        return super().join(rank, donor, self.merged(z))


@dataclass
class SparseLoco(Diloco):
    error: Rows = field(default_factory=dict)
    before: Rows = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.outer = SGD(1.0)

    def delta(self, z: Rows, part: slice) -> Array:
        self.before = dict(self.error)
        spans = [slice(0, 6), slice(6, 9)]
        sent = {}
        for rank, row in z.items():
            whole = 0.95 * self.error.get(rank, np.zeros_like(row)) + (self.theta - row)
            sent[rank] = _compress(whole, spans, 0.5, None)
            self.error[rank] = whole - sent[rank]
        return mean(sent)

    def lose(self, ranks: Collection[int]) -> None:
        if self.sent:
            self.error = self.before
        super().lose(ranks)
        for rank in ranks:
            self.error.pop(rank, None)

    def leave(self, rank: int, z: Rows) -> Rows:
        share = self.error[rank] / (len(z) - 1)
        self.error = {other: own + share for other, own in self.error.items()}
        return super().leave(rank, z)


@dataclass
class Noloco(Method):
    every: int = 2

    def __post_init__(self) -> None:
        self.phi: Rows = {}
        self.delta: Rows = {}

    def exchange(self, z: Rows, k: int) -> Rows:
        if (k + 1) % self.every:
            return z
        ranks = sorted(z)
        for rank in ranks:
            self.phi.setdefault(rank, self.start)
            self.delta.setdefault(rank, np.zeros_like(self.start))
        phi = np.stack([self.phi[rank] for rank in ranks])
        delta = 0.5 * np.stack([self.delta[rank] for rank in ranks])
        outer = phi - np.stack([z[rank] for rank in ranks])
        for pair in pairs(len(ranks), 0, k // self.every):
            delta[pair] -= 0.7 * outer[pair].mean(axis=0)
            delta[pair] -= 0.7 * (phi[pair] - phi[pair].mean(axis=0))
        for rank, row, change in zip(ranks, phi + delta, delta, strict=True):
            self.phi[rank], self.delta[rank] = row, change
        return {rank: self.phi[rank].copy() for rank in ranks}

    def lose(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self.phi.pop(rank, None)
            self.delta.pop(rank, None)

    def join(self, rank: int, donor: int, z: Rows) -> Rows:
        self.phi[rank] = z[donor].copy()
        self.delta[rank] = np.zeros_like(self.start)
        return super().join(rank, donor, z)


@dataclass
class Daso(Method):
    """The cycling phase, one rank a node; a sum in flight is lost, or merged early."""

    every: int = 4
    wait: int = 2

    def __post_init__(self) -> None:
        self.sent: tuple[Array, int] | None = None

    def merge(self, z: Rows) -> Rows:
        assert self.sent is not None
        rows = eq_1(np.stack([z[rank] for rank in sorted(z)]), self.sent[0], self.wait)
        self.sent = None
        return dict(zip(sorted(z), rows, strict=True))

    def exchange(self, z: Rows, k: int) -> Rows:
        if self.sent is not None and k >= self.sent[1]:
            z = self.merge(z)
        if self.sent is None and (k + 1) % self.every == 0:
            self.sent = np.stack([z[rank] for rank in sorted(z)]), k + self.wait
        return z

    def lose(self, ranks: Collection[int]) -> None:
        self.sent = None

    def join(self, rank: int, donor: int, z: Rows) -> Rows:
        return super().join(rank, donor, z if self.sent is None else self.merge(z))


def train(
    method: Method,
    gradient: Gradient,
    *,
    ranks: Collection[int],
    steps: int,
    lr: float,
    momentum: float = 0.0,
    losses: Mapping[int, Collection[int]] | None = None,
    joins: Mapping[int, int] | None = None,
    leaves: Mapping[int, int] | None = None,
) -> Rows:
    """Return the parameters by rank after ``steps``.

    ``losses[k]`` take no part from the exchange of step k on; ``joins[k]`` takes part from the
    exchange of parameters of step k on, with the parameters and the velocity of the next higher
    rank, or else of the lowest; ``leaves[k]`` has left before step k.
    """
    optimizer = SGD(lr, momentum)
    z: Rows = {rank: method.start.copy() for rank in sorted(ranks)}
    velocity: Rows = {rank: np.zeros_like(method.start) for rank in z}
    for k in range(steps):
        gone = (losses or {}).get(k, ())
        if gone:
            z = {rank: row for rank, row in z.items() if rank not in gone}
            method.lose(gone)
        if k in (leaves or {}):
            z = method.leave((leaves or {})[k], z)
        g = method.gradients({rank: gradient(rank, z[rank], k) for rank in z})
        for rank in z:
            z[rank], velocity[rank] = optimizer.step(z[rank], g[rank], velocity[rank])
        if k in (joins or {}):
            new = (joins or {})[k]
            donor = min((rank for rank in z if rank > new), default=min(z))
            z = method.join(new, donor, z)
            velocity[new] = velocity[donor].copy()
        z = method.exchange(z, k)
    return z
