"""Methods by name: constructors only, each line says what fills which slot."""

import ast
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from offbeat.exchange import Algorithm
from offbeat.gradients import Mean, TopK, TorchDDP
from offbeat.parameters import AdasumUpdate, Average, Cycle, PairAverage, PushSum, StaleAverage
from offbeat.topology.digraph import Digraph
from offbeat.topology.families import BipartiteExponential, Complete, Exponential, Ring
from offbeat.topology.graph import Topology
from offbeat.topology.phases import Phases, Symmetric

# Python 3.11's parser raises SystemError now and then when threads parse at the same time.
_parser = threading.Lock()

Within = Literal["local"] | None
Graph = Topology | str | Sequence[tuple[int | None, Any]] | Any  # the last: of networkx


def ddp(wire: Literal["bf16"] | None = None, bucket_mb: float = 25.0) -> Algorithm:
    """Mean gradients of all ranks in every backward: the baseline.

    See :class:`offbeat.gradients.Mean`.

    >>> ddp(wire="bf16").parameters is None
    True
    """
    return Algorithm(gradients=Mean(wire=wire, bucket_mb=bucket_mb))


def lags(
    density: float | Literal["adaptive"] = 0.001,
    max_ratio: float = 1000.0,
    selection: Literal["sampled", "exact"] = "sampled",
    momentum: float = 0.0,
    warmup: int | None = None,
    message_mb: float = 1 / 16,
    units: Literal["lr", "gradient"] | None = None,
    retune: int = 1000,
) -> Algorithm:
    """LAGS-SGD: the largest gradients of each layer in every backward, the others later.

    Pass ``replicate(..., optimizer=optimizer)``: with ``torch.optim.SGD`` the learning rate
    counts when a gradient arises, as in the paper. ``density="adaptive"`` sends as much of each
    layer as backward hides, and at least 1/``max_ratio``. See :class:`offbeat.gradients.TopK`.

    >>> lags(density=0.01).gradients.density
    0.01
    """
    top_k = TopK(
        density, selection, momentum, warmup, message_mb, "layer", units, max_ratio, retune
    )
    return Algorithm(gradients=top_k)


def slgs(density: float = 0.001) -> Algorithm:
    """Sparsification without layers: the largest gradients of the whole model, after backward.

    The baseline of :func:`lags`: the same top-k and memory, nothing overlapped.

    >>> slgs().gradients.scope
    'model'
    """
    return Algorithm(TopK(density, scope="model"))


def local_sgd(every: int = 8, within: Within = None) -> Algorithm:
    """Train apart, average the parameters every ``every`` steps.

    With ``within="local"`` gradients are averaged inside each node in every backward, and the
    nodes are what is averaged. See :class:`offbeat.parameters.Average`.

    >>> local_sgd(every=4).parameters.every
    4
    """
    return Algorithm(_inside(within), Average(every=every, over=_between(within)))


def adasum(
    every: int = 1,
    wire: Literal["bf16", "fp16"] | None = None,
    method: Literal["auto", "gather", "gram", "rvhdd"] = "auto",
    within: Within = None,
    nonfinite: Literal["raise", "skip"] = "raise",
    partition: bool = False,
) -> Algorithm:
    """Adasum of the optimizers' updates: their sum where orthogonal, their mean where parallel.

    With ``within="local"`` gradients are averaged inside each node in every backward, and the
    nodes' updates are combined. With ``partition=True`` besides, each rank of a node steps its own
    share of the layers: give the optimizer ``replica.owned_parameters()``. See
    :class:`offbeat.parameters.AdasumUpdate`.

    >>> adasum(wire="bf16").parameters.wire
    'bf16'
    >>> adasum(partition=True).parameters.over
    'node'
    """
    within = "local" if partition else within
    inside = Mean(over="local", partition=True) if partition else _inside(within)
    update = AdasumUpdate(every, wire, method, _between(within), nonfinite, partition)
    return Algorithm(inside, update)


def sgp(
    topology: Graph = "exponential",
    peers: int = 1,
    overlap: int = 0,
    wire: Literal["bf16"] | None = None,
    within: Within = None,
    biased: bool = False,
    on_failure: Literal["raise", "continue"] = "raise",
) -> Algorithm:
    """Stochastic Gradient Push: after every step send a share of oneself to a few peers.

    ``topology`` is "exponential" (to ``peers`` others, which change), "ring", "bipartite",
    "complete", a :class:`offbeat.Topology`, a networkx graph or a function that makes one of the
    number of participants, or phases of these: ``[(300, "complete"), (None, "exponential")]``.
    ``overlap`` is for how many steps a message may travel while training goes on. With
    ``within="local"`` gradients are averaged inside each node and the nodes gossip. With
    ``on_failure="continue"`` the survivors of a lost rank train on, where the launcher lets them. See
    :class:`offbeat.parameters.PushSum`.

    >>> sgp("ring").parameters.topology
    Ring()
    >>> sgp(overlap=1, wire="bf16").parameters.overlap
    1
    """
    graph = _graph(topology, peers)
    gossip = PushSum(graph, _between(within), overlap, wire, biased, on_failure)
    return Algorithm(_inside(within), gossip)


def d_psgd(
    topology: Graph = "ring", wire: Literal["bf16"] | None = None, within: Within = None
) -> Algorithm:
    """Decentralized parallel SGD: after every step average with the neighbours.

    On symmetric graphs, where every weight stays 1: "ring", "bipartite", "complete" or your own.
    Lian et al. 2017, Algorithm 1; neighbours are averaged after the step instead of before it.
    See :class:`offbeat.parameters.PushSum`.

    >>> d_psgd("bipartite").parameters.topology
    Symmetric(graph=BipartiteExponential())
    """
    graph = Symmetric(_graph(topology, 1))
    return Algorithm(_inside(within), PushSum(graph, _between(within), wire=wire))


def ad_psgd(within: Within = None) -> Algorithm:
    """Asynchronous decentralized SGD: average with one random partner at a time, never wait.

    With ``within="local"`` gradients are averaged inside each node and the nodes meet. See
    :class:`offbeat.parameters.PairAverage`.

    >>> ad_psgd().parameters
    PairAverage(over='world')
    """
    return Algorithm(_inside(within), PairAverage(_between(within)))


def daso(
    every: int = 4,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
    cooldown_steps: int | None = None,
    wait: int | None = None,
    wire: Literal["bf16"] | None = "bf16",
    patience: int = 10,
    threshold: float = 1e-4,
    report_every: int = 50,
) -> Algorithm:
    """DASO: mean gradients inside each node, and between nodes sums of models that travel on.

    Tell it the length of the run in optimizer steps, and the losses with ``replica.report_loss``.
    See :class:`offbeat.parameters.StaleAverage`, and :class:`offbeat.parameters.Cycle` for when
    nodes exchange.

    >>> daso(every=8, total_steps=1000).parameters.cycle.start.wait
    2
    """
    phases = total_steps, warmup_steps, cooldown_steps
    cycle = Cycle(every, wait, *phases, patience, threshold, report_every)
    return Algorithm(Mean(over="local"), StaleAverage(cycle, wire))


def alone() -> Algorithm:
    """No exchange at all: every rank trains by itself. The floor of time, not a method.

    >>> alone().gradients is None
    True
    """
    return Algorithm()


def torch_ddp(bucket_mb: float = 25.0) -> Algorithm:
    """Torch's own DistributedDataParallel, to compare with.

    See :class:`offbeat.gradients.TorchDDP`.

    >>> torch_ddp().gradients
    TorchDDP(bucket_mb=25.0, over='world')
    """
    return Algorithm(gradients=TorchDDP(bucket_mb))


RECIPES: tuple[Callable[..., Algorithm], ...] = (
    ddp,
    local_sgd,
    sgp,
    d_psgd,
    ad_psgd,
    lags,
    slgs,
    adasum,
    daso,
    torch_ddp,
    alone,
)


def algorithm(text: str) -> Algorithm:
    """The algorithm that a command line names: a recipe with literal arguments.

    Raises ``ValueError`` with the valid names for an unknown recipe or argument.

    >>> algorithm("local_sgd(every=4)") == local_sgd(every=4)
    True
    >>> algorithm("ddp") == ddp()
    True
    """
    recipes = {recipe.__name__: recipe for recipe in RECIPES}
    # On a command line names may have hyphens: torch-ddp.
    head, *rest = str(text).strip().partition("(")
    name, args, kwargs = _parse("".join((head.replace("-", "_"), *rest)))
    if name not in recipes:
        raise ValueError(
            f"unknown algorithm {name!r} in {text!r}; expected one of {', '.join(recipes)}"
        )
    signature = inspect.signature(recipes[name])
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{text!r}: {error}; the arguments of {name} are {', '.join(signature.parameters)}"
        ) from None
    return recipes[name](*args, **kwargs)


def _parse(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    try:
        with _parser:
            call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, [], {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            keywords = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
            if len(keywords) == len(call.keywords):
                return call.func.id, [ast.literal_eval(arg) for arg in call.args], keywords
    except (SyntaxError, TypeError, ValueError):
        pass
    raise ValueError(
        f"cannot read the algorithm {text!r}; expected a recipe with literal arguments, "
        'for example "local_sgd(every=8)"'
    )


def _inside(within: Within) -> Mean | None:
    if within not in (None, "local"):
        raise ValueError(f"within={within!r}, expected None or 'local' (the ranks of a node)")
    return Mean(over="local") if within == "local" else None


def _between(within: Within) -> Literal["world", "node"]:
    return "node" if within == "local" else "world"


def _graph(topology: Graph, peers: int) -> Topology:
    named: dict[str, Topology] = {
        "exponential": Exponential(peers),
        "ring": Ring(),
        "bipartite": BipartiteExponential(),
        "complete": Complete(),
    }
    if peers != 1 and topology != "exponential":
        raise ValueError(f"peers={peers} goes with topology='exponential', got {topology!r}")
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str) and topology in named:
        return named[topology]
    if isinstance(topology, list | tuple) and all(isinstance(p, list | tuple) for p in topology):
        return Phases(tuple((count, _graph(graph, 1)) for count, graph in topology))
    makes_graphs = callable(topology) and not isinstance(topology, type)
    if makes_graphs or hasattr(topology, "is_directed"):
        return Digraph(topology)
    raise ValueError(
        f"topology={topology!r}, expected one of {', '.join(map(repr, named))}, a Topology, a "
        "networkx graph or a function that makes one, or phases: [(9, 'complete'), (None, 'ring')]"
    )
