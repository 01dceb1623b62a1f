"""The recipes under contract, and which promises each one makes: a new recipe is one line."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest

import offbeat
from reference.ddp import ddp
from reference.local_sgd import local_sgd
from reference.participants import Array, Nodes
from reference.push_sum import one_peer_exponential, ring, sgp


@dataclass(frozen=True)
class Case:
    """A recipe as on a command line, its reference, and its promises."""

    text: str
    reference: Callable[..., Array] | None  # None: the clock decides, no run can be repeated
    tolerance: float = 1e-12  # of float64 against the float64 reference: only the order of sums
    mixes: bool = False  # moves parameters between ranks, and keeps their mean
    agrees: bool = False  # all ranks hold the same model after every step
    hierarchical: bool = False  # nodes are the participants

    @property
    def algorithm(self) -> offbeat.Algorithm:
        """The algorithm of the text."""
        return offbeat.algorithm(self.text)

    def nodes(self, size: int) -> Nodes:
        """``size`` ranks, unequally spread over two or three nodes if that matters."""
        if not self.hierarchical:
            return tuple((rank,) for rank in range(size))
        cut = [0, 1, *range(3, size, 3), size] if size > 2 else [0, 1, 2]
        return tuple(tuple(range(a, b)) for a, b in pairwise(cut) if b > a)


def _gossip(matrix: Callable[[int, int], Array], **more: object) -> Callable[..., Array]:
    return lambda *args, **kwargs: sgp(*args, matrix=matrix, **kwargs, **more)[0]


CASES = (
    Case("ddp", ddp, agrees=True),
    # Two casts of 2^-9 each on gradients of size ~1, over 20 steps of 0.1.
    Case("ddp(wire='bf16')", ddp, tolerance=2e-2, agrees=True),
    Case("local_sgd(every=3)", partial(local_sgd, every=3), mixes=True),
    Case("sgp", _gossip(one_peer_exponential), mixes=True),
    Case("sgp('ring')", _gossip(ring), mixes=True),
    Case(
        "local_sgd(every=3, within='local')",
        partial(local_sgd, every=3, within_local=True),
        mixes=True,
        hierarchical=True,
    ),
    Case(
        "sgp('ring', within='local')",
        _gossip(ring, within_local=True),
        mixes=True,
        hierarchical=True,
    ),
    Case("ad_psgd", None),
    Case("ad_psgd(within='local')", None, hierarchical=True),
)

every_recipe = pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
every_repeatable_recipe = pytest.mark.parametrize(
    "case", [case for case in CASES if case.reference], ids=lambda case: case.text
)
