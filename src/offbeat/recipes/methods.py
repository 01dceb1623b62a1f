"""Functions that build the :class:`~offbeat.Algorithm` of each method by name."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from offbeat.exchange import Algorithm
from offbeat.exchange.guard import Nonfinite
from offbeat.methods import (
    AdasumUpdate,
    Average,
    Cycle,
    Mean,
    OuterStep,
    PairAverage,
    PushSum,
    SlowMomentum,
    StaleAverage,
)
from offbeat.recipes.gradients import alone, ddp, lags, slgs, torch_ddp
from offbeat.recipes.outer import diloco, noloco, sparse_loco
from offbeat.recipes.recipe import Within, levels, recipe
from offbeat.settings import at_least, check_values
from offbeat.topology import Symmetric, Topology, as_topology

Graph = Topology | str | Sequence[tuple[int | None, Any]] | Any  # the last: of networkx


@recipe
def local_sgd(
    every: int = 8,
    *,
    outer: str | Callable[..., Any] | None = None,
    within: Within = None,
    nonfinite: Nonfinite = "raise",
) -> Algorithm:
    """Train independently and average the parameters every ``every`` steps (Local SGD).

    With ``within="local"``, here and in other recipes, gradients are averaged inside each node in
    every backward, and parameters between nodes. See :class:`offbeat.methods.Average`; with
    ``outer``, such as ``"Adam(lr=0.01)"``, see :class:`offbeat.methods.OuterStep`.

    >>> local_sgd(every=4, outer="SGD(lr=0.7, momentum=0.9)").parameters.fragments
    1
    """
    inside, over = levels(within)
    if outer is None:
        return Algorithm(inside, Average(every=every, over=over, nonfinite=nonfinite))
    if nonfinite != "raise":
        raise ValueError(
            f"nonfinite={nonfinite!r} with outer: the mean of all ranks is checked before the "
            "outer step, and is an error if it is not finite; leave out nonfinite"
        )
    return Algorithm(inside, OuterStep(every=every, outer=outer, over=over))


@recipe
def adasum(
    every: int = 1,
    *,
    wire: Literal["bf16", "fp16"] | None = None,
    method: Literal["auto", "gather", "gram", "rvhdd"] = "auto",
    within: Within = None,
    nonfinite: Nonfinite = "raise",
    partition: bool = False,
) -> Algorithm:
    """Combine the optimizers' updates with Adasum: the sum if orthogonal, the mean if parallel.

    ``partition=True`` implies ``within="local"``, and each rank of a node steps only its own share
    of the layers: build the optimizer with ``replica.owned_parameters()``. See
    :class:`offbeat.methods.AdasumUpdate`.

    >>> adasum(partition=True).parameters.over
    'node'
    """
    inside, over = levels("local" if partition else within)
    update = AdasumUpdate(
        every=every, wire=wire, method=method, over=over, nonfinite=nonfinite, partition=partition
    )
    return Algorithm(Mean(over="local", partition=True) if partition else inside, update)


@recipe
def sgp(
    topology: Graph = "exponential",
    *,
    peers: int = 1,
    overlap: int = 0,
    every: int = 1,
    wire: Literal["bf16"] | None = None,
    within: Within = None,
    biased: bool = False,
    weighted_updates: bool = False,
    nonfinite: Nonfinite = "raise",
    outer: str | Callable[..., Any] | None = None,
    outer_every: Annotated[int, at_least(1, "steps")] | None = None,
) -> Algorithm:
    """Send a share of the model to a few peers after every step (SGP and Overlap SGP).

    ``topology`` is "exponential" (``peers`` receivers, which change from step to step), "ring",
    "bipartite", "complete", a :class:`offbeat.Topology`, a networkx graph, a function that makes
    one from the number of participants, or phases of these:
    ``[(300, "complete"), (None, "exponential")]``. See :class:`offbeat.methods.PushSum`.

    With ``outer``, such as ``"SGD(lr=1, momentum=0.6)"``, the models are averaged exactly every
    ``outer_every`` steps (48 unless given), and the outer optimizer steps the average (SlowMo).
    See :class:`offbeat.methods.SlowMomentum`.

    >>> sgp(outer="SGD(lr=1, momentum=0.6)").parameters.every
    48
    """
    check_values(sgp, {"outer_every": outer_every})
    if outer is None and outer_every is not None:
        raise ValueError(
            f"outer_every={outer_every!r} without outer: there is no outer optimizer; give one, "
            "such as outer='SGD(lr=1, momentum=0.6)', or leave out outer_every"
        )
    inside, over = levels(within)
    gossip = PushSum(
        topology=as_topology(topology, peers),
        over=over,
        overlap=overlap,
        every=every,
        wire=wire,
        biased=biased,
        weighted_updates=weighted_updates,
        nonfinite=nonfinite,
    )
    if outer is None:
        return Algorithm(inside, gossip)
    return Algorithm(inside, SlowMomentum(gossip=gossip, outer=outer, every=outer_every or 48))


@recipe
def d_psgd(
    topology: Graph = "ring",
    *,
    wire: Literal["bf16"] | None = None,
    within: Within = None,
    nonfinite: Nonfinite = "raise",
) -> Algorithm:
    """Average the parameters with all neighbours after every step (D-PSGD).

    Takes symmetric graphs only, on which every push-sum weight stays 1: "ring", "bipartite",
    "complete" or a symmetric graph of your own. Source: Lian et al. 2017, Algorithm 1; there
    neighbours are averaged before the step. See :class:`offbeat.methods.PushSum`.

    >>> d_psgd("bipartite").parameters.topology
    Symmetric(graph=BipartiteExponential())
    """
    inside, over = levels(within)
    graph = Symmetric(as_topology(topology, peers=1))
    return Algorithm(inside, PushSum(topology=graph, over=over, wire=wire, nonfinite=nonfinite))


@recipe
def ad_psgd(*, within: Within = None, nonfinite: Nonfinite = "raise") -> Algorithm:
    """Average the parameters with one random partner at a time, without waiting (AD-PSGD).

    See :class:`offbeat.methods.PairAverage`.

    >>> ad_psgd().parameters
    PairAverage(over='world', nonfinite='raise')
    """
    inside, over = levels(within)
    return Algorithm(inside, PairAverage(over=over, nonfinite=nonfinite))


@recipe
def daso(
    every: int = 4,
    *,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
    cooldown_steps: int | None = None,
    wait: int | None = None,
    wire: Literal["bf16"] | None = "bf16",
    patience: int = 10,
    threshold: float = 1e-4,
    report_every: int = 50,
    merge: Literal["weighted", "exact"] = "weighted",
    nonfinite: Nonfinite = "raise",
) -> Algorithm:
    """Average gradients inside each node, and parameters between nodes with a delay (DASO).

    Give the length of the run in optimizer steps (``total_steps``), and report the losses with
    ``replica.report_loss``. See :class:`offbeat.methods.StaleAverage` for the exchange and
    :class:`offbeat.methods.Cycle` for its schedule.

    >>> daso(every=8, total_steps=1000).parameters.cycle.start.wait
    2
    """
    cycle = Cycle(
        every=every,
        wait=wait,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        cooldown_steps=cooldown_steps,
        patience=patience,
        threshold=threshold,
        report_every=report_every,
    )
    average = StaleAverage(cycle=cycle, wire=wire, merge=merge, nonfinite=nonfinite)
    return Algorithm(Mean(over="local"), average)


RECIPES: tuple[Callable[..., Algorithm], ...] = (
    ddp,
    local_sgd,
    diloco,
    sparse_loco,
    sgp,
    d_psgd,
    ad_psgd,
    noloco,
    lags,
    slgs,
    adasum,
    daso,
    torch_ddp,
    alone,
)
