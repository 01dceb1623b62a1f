"""Checks of a model before it becomes a replica, and of changes to it afterwards."""

import hashlib
import json
from collections.abc import Collection, Sequence
from itertools import chain, starmap
from operator import attrgetter, eq, gt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.attach.first_step import WRAPPED
from offbeat.attach.overlap import overlap
from offbeat.attach.slots import SlotFiller
from offbeat.exchange import Exchanged
from offbeat.exchange.sharding import is_flattened, is_sharded, local, placed, sharding_fault
from offbeat.transport.links import connections
from offbeat.transport.world import World
from offbeat.version import __version__

# What is equal as a whole, and how an error names it.
_WHOLE = {
    "offbeat": "the version of offbeat is",
    "torch": "the version of torch is",
    "algorithm": "the algorithm is",
    "nodes": "the mesh has the nodes",
    "elastic": "elastic is",
    "waits": "elastic runs with a scaler, weights or parameters of no optimizer are",
    "weighted": "weighted is",
    "connections": "the number of connections is",
}

Fingerprint = dict[str, Any]
Trait = tuple[tuple[torch.dtype, torch.device], int, tuple[int, ...]]  # address and strides
_kind = attrgetter("dtype", "device")


class Watcher:
    """What registers hooks on the parameters of a replica."""


def model_fault(model: Exchanged) -> str | None:
    """Return why this rank's model cannot be replicated, or None."""
    parameters, buffers, ignored = model.parameters, model.buffers, model.ignored
    if isinstance(model.module, DistributedDataParallel):
        return WRAPPED
    if is_flattened(model.module):
        return (
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which flattens parameters; "
            "shard it by torch.distributed.fsdp.fully_shard"
        )
    if not any(p.requires_grad for p in parameters.values()):
        return "the model has no trainable parameters to exchange"
    for name, tensor in (parameters | buffers | ignored).items():  # a saved state has ignored ones
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            return f"{name!r} is not initialized yet; run one forward pass first"
    for name, p in parameters.items():
        if local(p).is_meta:
            return f"parameter {name!r} is on the meta device; materialize the model first"
        if p.is_complex():
            return f"parameter {name!r} is complex; store it as torch.view_as_real"
        if _is_watched(p):
            return f"parameter {name!r} already belongs to a replica; call its detach() first"
    for name, b in buffers.items():
        if b.is_meta:
            return f"buffer {name!r} is on the meta device; materialize the model first"
        if b.is_quantized or b.layout is not torch.strided:
            return (
                f"buffer {name!r} is quantized or sparse ({b.dtype}, {b.layout}) and cannot be "
                f"averaged; store it as a dense tensor, or pass ignore=[{name!r}]"
            )
    for name, tensor in (parameters | buffers).items():
        if any(
            n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            return f"{name!r} is an expanded view that cannot be written to; store its .clone()"
    devices = {str(p.device) for p in parameters.values()}
    if len(devices) > 1:
        return f"the parameters lie on several devices ({', '.join(sorted(devices))}); use one"
    return _shared_memory(model)


def gradients_fault(filler: SlotFiller) -> str | None:
    """Return why gradients of this rank cannot be exchanged, or its optimizers be read, or None."""
    model, gradients = filler.model, filler.algorithm.gradients
    if gradients and (fault := gradients.fault(model.trained, filler.optimizers)):
        return fault
    if not (tables := sorted(model.sparse)):
        return None
    fix = f"parameter {tables[0]!r} has sparse gradients; set sparse=False, or ignore the module"
    if model.is_sharded:
        return f"FSDP2 averages dense gradients only, and {fix}"
    if gradients is not None and not gradients.takes_sparse:
        return f"{gradients} takes dense gradients only, and {fix}"
    return None


def shards_fault(filler: SlotFiller, world: World) -> str | None:
    """Return why the algorithm cannot exchange this rank's shards on these nodes, or None."""
    model, gradients = filler.model, filler.algorithm.gradients
    if gradients is not None and not gradients.takes_shards:
        return (
            f"{gradients} cannot exchange gradients of a sharded model; use ddp() or lags(), which "
            "exchange them between nodes, or a recipe that exchanges parameters, for example "
            "sgp(within='local') or local_sgd(within='local')"
        )
    return sharding_fault(model.module, model.parameters | model.buffers, world)


def _is_watched(parameter: Tensor) -> bool:
    """Return whether a replica has a hook on this parameter."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    owners = [getattr(getattr(h, "func", h), "__self__", None) for h in hooks.values()]
    return any(isinstance(owner, Watcher) for owner in owners)


def _shared_memory(model: Exchanged) -> str | None:
    own = {name: t for name, t in model.ignored.items() if isinstance(t, nn.Parameter)}
    every = {name: local(p) for name, p in (model.parameters | own).items()}
    placed = {n: t for n, t in every.items() if t.layout is torch.strided and not t.is_meta}
    if shared := overlap(placed, but=own):
        ignored = [name for name in shared if name in own]
        effect = f"{ignored[0]!r} would not stay its own" if ignored else "each would be exchanged"
        return (
            f"parameters {shared[0]!r} and {shared[1]!r} share memory and are two objects, so "
            f"{effect}; register one Parameter under both names, or .clone() one"
        )
    return None


def fingerprint(filler: SlotFiller, nodes: object) -> Fingerprint:
    """Return everything that must be equal on all ranks, as plain values."""
    model, algorithm, sparse = filler.model, filler.algorithm, filler.model.sparse
    tensors: dict[str, list[object]] = {}
    for name, p in model.parameters.items():
        kind = "trainable" if p.requires_grad else "frozen"
        kind = "trainable by sparse gradients" if name in sparse else kind
        strides = p.stride() if is_sharded(p) else torch.empty_like(p, device="meta").stride()
        kind += placed(p)
        tensors[name] = [kind, list(p.shape), str(p.dtype), list(strides)]
    for name, b in model.buffers.items():
        tensors[name] = ["buffer", list(b.shape), str(b.dtype), []]
    for name in model.ignored:
        tensors[name] = ["ignored", [], "", []]
    # Of a function the algorithm's text shows the name only.
    gradients = algorithm.gradients
    settings = {} if gradients is None else dict(gradients.resolved(model.trained))
    return {
        "offbeat": __version__,
        # A patch release keeps the messages of process groups, and may round otherwise.
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "tensors": tensors,
        "algorithm": repr(algorithm),
        "recipe": str(algorithm),
        "nodes": repr(nodes),
        "settings": settings,
        "elastic": str(filler.is_elastic),
        "waits": str(filler.is_elastic and not filler.heals),
        "weighted": str(filler.samples is not None),
        "connections": str(connections(filler.connections)),
    }


def digest_of(found: Fingerprint) -> str:
    """Return a digest that is equal on all ranks; one algorithm may be written in several ways."""
    compared = {key: value for key, value in found.items() if key != "recipe"}
    return hashlib.sha256(json.dumps(compared).encode()).hexdigest()


def difference(first: Fingerprint, other: Fingerprint) -> str | None:
    """Return what differs between two ranks, or None."""
    for key, name in _WHOLE.items():
        if first.get(key) != other.get(key):
            is_told = key == "algorithm" and first["recipe"] != other["recipe"]
            shown = "recipe" if is_told else key
            return f"{name} {first.get(shown)} here and {other.get(shown)} there"
    here, there = first["tensors"], other["tensors"]
    for name in {**here, **there}:
        if (name in here) != (name in there):
            return f"{name!r} exists on only one of them"
        for what, a, b in zip(
            ("kind", "shape", "dtype", "strides"), here[name], there[name], strict=True
        ):
            if a != b:
                return f"the {what} of {name!r} is {a} here and {b} there"
    if list(here) != list(there):
        return "their parameters come in different orders"
    for name, value in first["settings"].items():
        if value != other["settings"][name]:
            return f"the algorithm's {name} is {value} here and {other['settings'][name]} there"
    return None


def require_shares(filler: SlotFiller, nodes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if the ranks of a node are to share the layers but cannot."""
    gradients = filler.algorithm.gradients
    if gradients is None or not gradients.partition:
        return
    counts = [len(node) for node in nodes]
    if len(set(counts)) > 1:
        raise ValueError(
            f"partition=True on nodes of {', '.join(map(str, counts))} ranks: a layer has one "
            "owner on every node, and owners exchange; start equally many ranks on each, or "
            "leave partition at False"
        )
    trainable = len(filler.model.trained)
    if trainable < counts[0]:
        raise ValueError(
            f"partition=True with {trainable} trainable parameters for {counts[0]} ranks of a "
            "node: each must own one; leave partition at False"
        )


class Snapshot:
    """The parameters of a model as they are now, to notice changes that hooks cannot survive."""

    def __init__(self, model: Exchanged) -> None:
        # The dicts in which modules keep parameters and children, compared in each step without
        # loops of Python: named_parameters() alone would take most of that time.
        self._traits = _traits(model)
        modules = list(model.module.modules())
        self._children = [(m._modules, dict(m._modules)) for m in modules]
        ignored = {id(tensor) for tensor in model.ignored.values()}
        owns = [{name for name, p in m._parameters.items() if id(p) in ignored} for m in modules]
        places = [(m._parameters, own) for m, own in zip(modules, owns, strict=True)]
        self._whole = [parameters for parameters, own in places if not own]
        self._divided = [place for place in places if place[1]]
        self._identities = _identities(self._whole, self._divided)
        self._parameters = [*model.parameters.values()]
        self._layout, self._trained = _layout(self._parameters), _are_trained(self._parameters)

    def change(self, model: Exchanged, rank: int) -> ValueError | None:
        """Return an error that names changes since then, if there are any."""
        if self._is_as_before():
            return None
        # A parameter that is frozen is no change: it counts as unused, as in loops that train two
        # networks in turns. One that was frozen at the attach has no hook, and cannot be unfrozen.
        now = _traits(model)
        names = [n for n in {**self._traits, **now} if self._traits.get(n) != now.get(n)]
        before = zip(self._parameters, self._trained, strict=True)
        thawed = {id(p) for p, trained in before if p.requires_grad and not trained}
        names += [n for n, p in model.parameters.items() if id(p) in thawed]
        if not names:
            return None
        return ValueError(
            f"rank {rank}: parameters {names[:3]} were replaced, added, removed, unfrozen, cast, "
            "moved or laid out anew in memory since replicate(); call finish() and detach() before "
            "such a change and replicate() again after it"
        )

    def _is_as_before(self) -> bool:
        return (
            all(starmap(eq, self._children))
            and _identities(self._whole, self._divided) == self._identities
            and _layout(self._parameters) == self._layout
            and not any(map(gt, _are_trained(self._parameters), self._trained))
        )


def _identities(
    whole: Sequence[dict[str, Any]], divided: Sequence[tuple[dict[str, Any], Collection[str]]]
) -> list[int]:
    """Return those of all parameters in dicts, of some without the names beside them."""
    found = [*map(id, chain.from_iterable(map(dict.values, whole)))]
    return found + [id(p) for ps, but in divided for name, p in ps.items() if name not in but]


def _layout(parameters: Sequence[Tensor]) -> list[Trait]:
    held = [p if type(p) is nn.Parameter else local(p) for p in parameters]
    traits = map(_kind, parameters), map(Tensor.data_ptr, held), map(Tensor.stride, held)
    return [*zip(*traits, strict=True)]


def _are_trained(parameters: Sequence[Tensor]) -> list[bool]:
    return [p.requires_grad for p in parameters]


def _traits(model: Exchanged) -> dict[str, tuple[int, Trait]]:
    named = model.parameters
    traits = zip(map(id, named.values()), _layout([*named.values()]), strict=True)
    return dict(zip(named, traits, strict=True))
