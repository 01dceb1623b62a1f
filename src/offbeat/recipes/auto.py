"""A run that chooses its method itself."""

from collections.abc import Sequence

from offbeat.exchange import Algorithm
from offbeat.exchange.algorithm import Auto
from offbeat.recipes.gradients import ddp
from offbeat.recipes.recipe import recipe
from offbeat.settings import check_values

EXACT = "ddp()", "ddp(bucket_mb=4)", "ddp(bucket_mb=100)"
CANDIDATES = (
    "ddp()",
    "ddp(wire='bf16')",
    "sgp(overlap=1, wire='bf16')",
    "local_sgd(every=8)",
    "diloco(every=64)",
)


@recipe
def auto(*, candidates: Sequence[str] | None = None, exact: bool = False) -> Algorithm:
    """Start under :func:`ddp`, measure the run, and switch to the method whose steps are fastest.

    After 5 steps, all ranks measure how long they compute, and the rate and the latency of the
    links by some small messages. ``offbeat plan`` predicts the step of every candidate from these,
    and the first one that takes at most 1.05 times as long as the fastest goes on (1.02 times, if
    it is preferred to the present one). They decide again every 10 steps, or as often as takes 2 %
    of the time. Pass ``optimizer=`` to :func:`offbeat.replicate`; see :meth:`Replica.switch` for
    what a switch does. Each decision is a line of the logger "offbeat" on the first rank, and in
    ``stats()["auto"]``.

    Args:
        candidates: algorithms as text, in the order of preference; by default ``ddp()``,
            ``ddp(wire='bf16')``, ``sgp(overlap=1, wire='bf16')``, ``local_sgd(every=8)`` and
            ``diloco(every=64)``.
        exact: True for the exact mean of all gradients in every step: candidates are ``ddp()`` and
            other sizes of its buckets.

    Bytes sent per decision: at most 1 MiB in each of three messages. Raises ``ValueError`` with
    both arguments; and ``replicate()`` does, on all ranks, for candidates that cannot be run.

    >>> auto(exact=True).auto.candidates
    ('ddp()', 'ddp(bucket_mb=4)', 'ddp(bucket_mb=100)')
    """
    if exact and candidates is not None:
        raise ValueError("exact=True with candidates: it has its own; leave one of both out")
    check_values(auto, {"exact": exact})
    is_list = isinstance(candidates, list | tuple) and all(isinstance(c, str) for c in candidates)
    if candidates is not None and not (is_list and candidates):
        raise ValueError(f"candidates={candidates!r}, expected a list of algorithms as text")
    chosen = tuple(candidates or (EXACT if exact else CANDIDATES))
    return ddp().chosen_by(Auto(chosen))
