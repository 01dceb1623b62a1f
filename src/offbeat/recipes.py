"""Methods by name: constructors only, each line says what fills which slot."""

import ast
import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

from offbeat.exchange import Algorithm
from offbeat.gradients import Mean, TopK, TorchDDP
from offbeat.parameters import Average, PushSum
from offbeat.topology import OnePeerExponential, Ring, Topology

# Python 3.11's parser raises SystemError now and then when threads parse at the same time.
_parser = threading.Lock()

Within = Literal["local"] | None


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
    message_mb: float = 1 / 64,
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


def sgp(
    topology: Topology | Literal["exponential", "ring"] = "exponential", within: Within = None
) -> Algorithm:
    """Stochastic Gradient Push: after every step send a share of oneself to a few peers.

    ``topology`` is "exponential" (one peer, changing), "ring", or a :class:`offbeat.Topology` of
    your own. With ``within="local"`` gradients are averaged inside each node and the nodes
    gossip. See :class:`offbeat.parameters.PushSum`.

    >>> sgp("ring").parameters.topology
    Ring()
    """
    return Algorithm(_inside(within), PushSum(_graph(topology), over=_between(within)))


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


RECIPES: tuple[Callable[..., Algorithm], ...] = (ddp, local_sgd, sgp, lags, slgs, torch_ddp, alone)


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


def _graph(topology: Topology | str) -> Topology:
    if isinstance(topology, Topology):
        return topology
    named: dict[str, Topology] = {"exponential": OnePeerExponential(), "ring": Ring()}
    if not isinstance(topology, str) or topology not in named:
        raise ValueError(
            f"topology={topology!r}, expected one of {', '.join(map(repr, named))} or a Topology"
        )
    return named[topology]
