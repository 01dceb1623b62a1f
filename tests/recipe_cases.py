"""The recipes under contract, and which promises each one makes: a new recipe is one line."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest

import offbeat
from reference.adasum import adasum, bf16
from reference.daso import daso
from reference.ddp import ddp
from reference.diloco import diloco
from reference.lags import lags
from reference.local_sgd import local_sgd
from reference.noloco import noloco
from reference.participants import Array, Nodes
from reference.push_sum import (
    complete,
    one_peer_exponential,
    ring,
    sgp,
)
from reference.slow_momentum import slow_momentum
from reference.sparse_loco import sparse_loco


@dataclass(frozen=True)
class Case:
    """A recipe as on a command line, its reference, and its promises."""

    text: str
    reference: Callable[..., Array] | None  # None: the clock decides, no run can be repeated
    tolerance: float = 1e-12  # of float64 against the float64 reference: only the order of sums
    mixes: bool = False  # moves parameters between ranks, and keeps their mean
    agrees: bool = False  # all ranks hold the same model after every step
    hierarchical: bool = False  # nodes are the participants
    pairs: bool = False  # nodes must be equal: two ranks each, or one where the number is odd
    averages: bool = True  # rests where the mean gradient is zero, although ranks' own are not
    of_rows: Callable[..., Array] | None = None  # reference if the first layer is sent as rows
    settles: int = 60  # steps of 1/k until it has forgotten the start

    @property
    def algorithm(self) -> offbeat.Algorithm:
        """The algorithm of the text."""
        return offbeat.algorithm(self.text)

    def nodes(self, size: int) -> Nodes:
        """``size`` ranks, unequally spread over two or three nodes if that matters."""
        if self.pairs and size % 2 == 0:
            return tuple((rank, rank + 1) for rank in range(0, size, 2))
        if not self.hierarchical or self.pairs:
            return tuple((rank,) for rank in range(size))
        cut = [0, 1, *range(3, size, 3), size] if size > 2 else [0, 1, 2]
        return tuple(tuple(range(a, b)) for a, b in pairwise(cut) if b > a)


def _first(method: Callable[..., tuple[Array, Array]], **more: object) -> Callable[..., Array]:
    return lambda *args, **kwargs: method(*args, **kwargs, **more)[0]


def _gossip(matrix: Callable[[int, int], Array], **more: object) -> Callable[..., Array]:
    return lambda *args, **kwargs: sgp(*args, matrix=matrix, **kwargs, **more)[0]


def _phases(size: int, index: int) -> Array:
    return complete(size, index) if index < 3 else ring(size, index - 3)


def _updates(**more: object) -> Callable[..., Array]:
    return partial(adasum, layers=(6, 3), **more)  # the parameters of the quadratic


CASES = (
    Case("ddp", ddp, agrees=True),
    # Two casts of 2^-9 each on gradients of size ~1, over 20 steps of 0.1.
    Case("ddp(wire='bf16')", ddp, tolerance=2e-2, agrees=True),
    # Two layers, of 6 and 3 entries. With two ranks one entry of each is sent; with more, layers
    # for which that is no cheaper than an all-reduce are sent whole.
    Case(
        "lags(density=0.2)",
        _first(lags, layers=(6, 3), density=0.2),
        agrees=True,
        of_rows=_first(lags, layers=(6, 3), density=(1.0, 0.2)),
    ),
    Case(
        "lags(density=0.2, wire='bf16')",
        _first(lags, layers=(6, 3), density=0.2, rounded=bf16),
        agrees=True,
        of_rows=_first(lags, layers=(6, 3), density=(1.0, 0.2), rounded=bf16),
    ),
    Case(
        "slgs(density=0.25)",
        _first(lags, layers=(9,), density=0.25),
        agrees=True,
        of_rows=_first(lags, layers=(6, 3), density=(1.0, 0.25)),
    ),
    Case("lags(density=1.0)", ddp, agrees=True),
    Case("local_sgd(every=3)", partial(local_sgd, every=3), mixes=True),
    Case("adasum", _updates(), agrees=True, averages=False),
    Case("adasum(every=3, method='gram')", _updates(every=3), averages=False),
    Case(
        "adasum(wire='bf16', method='gram')",
        _updates(rounded=bf16),
        agrees=True,
        averages=False,
    ),
    Case("sgp", _gossip(one_peer_exponential), mixes=True),
    Case("sgp('ring')", _gossip(ring), mixes=True),
    Case("sgp(overlap=1)", _gossip(one_peer_exponential, overlap=1)),
    Case("sgp('ring', overlap=2)", _gossip(ring, overlap=2)),
    # One cast of 2^-9 on parameters of size ~1 in every exchange; mass is exact all the same.
    Case("sgp(overlap=1, wire='bf16')", _gossip(one_peer_exponential, overlap=1), tolerance=2e-2),
    Case(
        "sgp(overlap=1, weighted_updates=True)",
        _gossip(one_peer_exponential, overlap=1, weighted=True),
        averages=False,  # it does, but w = 2/3 of steps of 1/k takes longer than the test
    ),
    Case("sgp('ring', every=3)", _gossip(ring, every=3), mixes=True),
    Case("sgp('complete')", _gossip(complete), mixes=True),
    Case("sgp([(3, 'complete'), (None, 'ring')], overlap=1)", _gossip(_phases, overlap=1)),
    Case("d_psgd", _gossip(ring), mixes=True),
    Case(
        "local_sgd(every=3, within='local')",
        partial(local_sgd, every=3, within_local=True),
        mixes=True,
        hierarchical=True,
    ),
    Case("adasum(method='gram', within='local')", _updates(within_local=True), hierarchical=True),
    Case(
        "adasum(partition=True)",
        _updates(within_local=True),
        averages=False,
        hierarchical=True,
        pairs=True,
    ),
    Case(
        "sgp(overlap=2, within='local')",
        _gossip(one_peer_exponential, overlap=2, within_local=True),
        hierarchical=True,
    ),
    Case(
        "sgp('ring', within='local')",
        _gossip(ring, within_local=True),
        mixes=True,
        hierarchical=True,
    ),
    Case("local_sgd(every=3, outer='SGD(lr=1.0)')", partial(local_sgd, every=3), mixes=True),
    Case("diloco(every=3)", partial(diloco, every=3), settles=250),  # its momentum swings
    Case(
        "diloco(every=3, momentum=0.0, lr=1.2, nesterov=False, within='local')",
        partial(diloco, every=3, outer_momentum=0.0, outer_lr=1.2, within_local=True),
        hierarchical=True,
    ),
    # Fragments: `matrix`, entries 0 to 5, and `vector`, 6 to 8.
    Case(
        "diloco(every=3, fragments=2)",
        partial(diloco, every=3, fragments=(slice(0, 6), slice(6, 9))),
        settles=250,
    ),
    Case(
        "diloco(every=4, fragments=2, delay=3, lr=1.0, momentum=0.5)",
        partial(
            diloco,
            every=4,
            fragments=(slice(0, 6), slice(6, 9)),
            delay=3,
            mixing=0.5,
            outer_lr=1.0,
            outer_momentum=0.5,
        ),
    ),
    Case(
        "diloco(every=3, delay=1, mixing=0.25, lr=1.0, momentum=0.5, within='local')",
        partial(
            diloco,
            every=3,
            delay=1,
            mixing=0.25,
            outer_lr=1.0,
            outer_momentum=0.5,
            within_local=True,
        ),
        hierarchical=True,
    ),
    # Differences of a few steps, below 1, to 8 bits; the errors are carried.
    Case(
        "diloco(every=3, lr=1.0, momentum=0.5, wire='bf16')",
        partial(diloco, every=3, outer_lr=1.0, outer_momentum=0.5),
        tolerance=2e-2,
    ),
    Case(
        "diloco(every=3, delay=1, mixing=0.25, lr=1.0, momentum=0.5, within='local', wire='int8')",
        partial(
            diloco,
            every=3,
            delay=1,
            mixing=0.25,
            outer_lr=1.0,
            outer_momentum=0.5,
            within_local=True,
        ),
        tolerance=2e-2,
        hierarchical=True,
    ),
    # Half of `matrix`, and one of the three of `vector`.
    Case(
        "sparse_loco(every=3, density=0.5, bits=None)",
        partial(sparse_loco, every=3, layers=(6, 3), density=0.5, decay=0.95, bits=None),
    ),
    Case(
        "sparse_loco(every=2, density=0.7, decay=0.5, bits=4, lr=0.8, within='local')",
        partial(
            sparse_loco,
            every=2,
            layers=(6, 3),
            density=0.7,
            decay=0.5,
            bits=4,
            outer_lr=0.8,
            within_local=True,
        ),
        hierarchical=True,
    ),
    Case("noloco(every=3)", partial(noloco, every=3)),
    Case(
        "noloco(every=2, lr=0.9, momentum=0.25, gossip_lr=0.4, seed=7, within='local')",
        partial(
            noloco,
            every=2,
            beta=0.9,
            alpha=0.25,
            gamma=0.4,
            seed=7,
            within_local=True,
        ),
        hierarchical=True,
    ),
    Case(
        "sgp(outer='SGD(lr=1, momentum=0.5)', outer_every=3)",
        partial(slow_momentum, matrix=one_peer_exponential, every=3, beta=0.5),
    ),
    Case(
        "sgp('ring', overlap=1, outer='SGD(lr=0.8, momentum=0.5)', outer_every=4)",
        partial(slow_momentum, matrix=ring, every=4, overlap=1, alpha=0.8, beta=0.5),
    ),
    # An average two steps after a message was sent, which arrives after three.
    Case(
        "sgp(overlap=3, within='local', outer='SGD(lr=1, momentum=0.5)', outer_every=5)",
        partial(
            slow_momentum,
            matrix=one_peer_exponential,
            every=5,
            overlap=3,
            beta=0.5,
            within_local=True,
        ),
        hierarchical=True,
    ),
    Case(
        "sgp('ring', within='local', outer='SGD(lr=1)', outer_every=4)",
        partial(slow_momentum, matrix=ring, every=4, within_local=True),
        mixes=True,
        hierarchical=True,
    ),
    Case("daso(every=2)", partial(daso, every=2, wait=1), mixes=True, hierarchical=True),
    Case(
        "daso(every=3, wait=2, merge='exact')",
        partial(daso, every=3, wait=2, is_exact=True),
        mixes=True,
        hierarchical=True,
    ),
    # Warm-up until step 3, cycling until 10, then cool-down.
    Case(
        "daso(every=4, wait=2, total_steps=1000, warmup_steps=3, cooldown_steps=990)",
        partial(daso, every=4, wait=2, total=1000, warmup=3, cooldown=990, rounded=bf16),
        hierarchical=True,
    ),
    Case("ad_psgd", None),
    Case("ad_psgd(within='local')", None, hierarchical=True),
)


def of_each_recipe(cases: Iterable[Case]) -> list[Case]:
    """The first and the last of the cases of each recipe, where options make no difference."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.text.partition("(")[0], []).append(case)
    return [case for each in kinds.values() for case in dict.fromkeys((each[0], each[-1]))]


every_recipe = pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
every_repeatable_recipe = pytest.mark.parametrize(
    "case", [case for case in CASES if case.reference], ids=lambda case: case.text
)
