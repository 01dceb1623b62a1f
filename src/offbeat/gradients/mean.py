"""The mean gradient, exchanged in buckets while backward goes on."""

import math
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from offbeat.collectives import Handle, all_reduce, broadcast, mean, wire_device
from offbeat.exchange import GradientExchange, Saved, Site
from offbeat.functional import pack, partition
from offbeat.groups import Group

FIRST_BUCKET = 2**20  # bytes; small, so that the wire starts working early in backward
MESSAGES = 8  # at least, if they hold 1 MiB: one that holds most of a model overlaps with nothing


@dataclass(eq=False)
class Bucket:
    """Gradients that travel as one message, followed by one flag each: somebody has it."""

    wire: Tensor
    views: dict[str, Tensor]
    flags: Tensor
    missing: set[str]
    handle: Handle | None = None


@dataclass(eq=False)
class MeanState:
    """What :class:`Mean` knows of one replica; only the order outlives a run."""

    site: Site
    group: Group
    order: list[str]
    order_is_measured: bool = False
    seen: list[str] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    home: dict[str, Bucket] = field(default_factory=dict)
    launched: int = 0


@final
@dataclass(frozen=True)
class Mean(GradientExchange[MeanState]):
    r"""Average the gradients of all ranks, overlapped with backward.

    .. math:: g = \frac{1}{P} \sum_{p=1}^{P} g_p

    ``over`` is "world" or "local" (the ranks of a node). ``wire="bf16"`` halves the bytes: cast
    once, summed in float32, rounded once. Buckets hold gradients in the order in which rank 0
    saw them become ready in its first backward, and leave in that order on every rank; they are
    smaller than ``bucket_mb`` where a model would fill fewer than eight. A
    parameter unused on some ranks counts as zero there; unused on all, its gradient stays None.

    Bytes sent per step: 2 (P-1)/P of the gradients' (of half of them with "bf16"). Extra memory:
    none in full precision, ``.grad`` becomes a view of its bucket; else the 16-bit copy, twice.
    Passes over memory: two (copy, scale) over buckets that fit a cache; 16 bits: two more.

    Source: Li et al. 2020, "PyTorch Distributed", section 3.2.
    """

    over: Literal["world", "local"] = "world"
    wire: Literal["bf16"] | None = None
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if self.over not in ("world", "local"):
            raise ValueError(f"over={self.over!r}, expected 'world' or 'local'")
        if self.wire not in (None, "bf16"):
            raise ValueError(f"wire={self.wire!r}, expected None (full precision) or 'bf16'")
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, int | float):
            raise ValueError(f"bucket_mb={self.bucket_mb!r}, expected a number of MiB")
        if not 0 < self.bucket_mb < math.inf:
            raise ValueError(f"bucket_mb={self.bucket_mb!r}, expected a positive number of MiB")

    def init(self, site: Site) -> MeanState:
        """Buckets in reverse order of registration, until backward shows the real order."""
        assert site.group is not None, "a slot alone in its group is replaced by nothing"
        state = MeanState(site, site.group, list(site.parameters)[::-1])
        self._build(state)
        return state

    def ready(self, state: MeanState, name: str) -> None:
        """Launch the buckets that are full, in order."""
        bucket = state.home[name]
        if name not in bucket.missing:  # scaled, and perhaps sent, already
            fault = ValueError(
                f"parameter {name!r} got a gradient twice in one backward: it is used inside and "
                "outside of a block checkpointed with use_reentrant=True; use use_reentrant=False"
            )
            raise state.group.heartbeat.condemn(fault)
        state.seen.append(name)
        bucket.missing.discard(name)
        while not self.complete(state) and not state.buckets[state.launched].missing:
            _launch(state)

    def complete(self, state: MeanState) -> bool:
        """Whether every bucket is on its way."""
        return state.launched == len(state.buckets)

    def finish(self, state: MeanState) -> None:
        """Send the buckets that miss gradients too, wait, and hand out the means."""
        while not self.complete(state):
            _launch(state)
        for bucket in state.buckets:
            assert bucket.handle is not None, "every bucket was launched"
            bucket.handle.wait()
            _hand_out(state, bucket)
            bucket.handle, bucket.missing = None, set(bucket.views)
        state.launched = 0
        if not state.order_is_measured:
            self._measure_order(state)
        state.seen.clear()

    def save(self, state: MeanState) -> Saved:
        """The measured order: it decides in which order floats are added."""
        return {"order": list(state.order), "measured": state.order_is_measured}

    def load(self, state: MeanState, saved: Saved) -> None:
        """Take over the order, as all ranks do."""
        state.order, state.order_is_measured = list(saved["order"]), bool(saved["measured"])
        self._build(state)

    def _build(self, state: MeanState) -> None:
        parameters = state.site.parameters
        state.buckets.clear()
        for dtype in dict.fromkeys(parameters[name].dtype for name in state.order):
            names = [name for name in state.order if parameters[name].dtype == dtype]
            sizes = [parameters[name].nbytes for name in names]
            share = max(FIRST_BUCKET, sum(sizes) // MESSAGES)
            capacity = min(int(self.bucket_mb * 2**20), share)
            for run in partition(sizes, capacity, min(FIRST_BUCKET, capacity)):
                state.buckets.append(self._bucket(state, [names[i] for i in run]))
        state.home = {name: bucket for bucket in state.buckets for name in bucket.views}

    def _bucket(self, state: MeanState, names: list[str]) -> Bucket:
        parameters = [state.site.parameters[name] for name in names]
        dtype = parameters[0].dtype
        if self.wire == "bf16" and dtype.itemsize > 2:
            dtype = torch.bfloat16
        sizes = [parameter.numel() for parameter in parameters]
        device = wire_device(state.group, parameters[0].device)
        wire = torch.zeros(sum(sizes) + len(names), dtype=dtype, device=device)
        *parts, flags = wire.split([*sizes, len(names)])
        views = map(_like, parts, parameters)
        return Bucket(wire, dict(zip(names, views, strict=True)), flags, set(names))

    def _measure_order(self, state: MeanState) -> None:
        """Rebuild the buckets in the order in which rank 0 saw gradients become ready."""
        names = list(state.site.parameters)
        order = [*dict.fromkeys(state.seen)]
        order += [name for name in state.order if name not in set(order)]
        indices = torch.tensor([names.index(name) for name in order])
        indices = indices.to(wire_device(state.group))
        broadcast(indices, 0, state.group).wait()
        state.order, state.order_is_measured = [names[i] for i in indices.tolist()], True
        self._build(state)


def _launch(state: MeanState) -> None:
    # In one order on every rank, whatever the order of readiness: collectives pair up by the
    # order of their launches, so a rank that let bucket 2 overtake bucket 1 would mix them.
    bucket = state.buckets[state.launched]
    bucket.flags.fill_(1)
    filled = {}
    for index, (name, view) in enumerate(bucket.views.items()):
        grad = state.site.parameters[name].grad
        if grad is None:
            view.zero_()
            bucket.flags[index] = 0
        else:  # of this backward, or of one before it that was not exchanged
            _require_plain(state, name, grad)
            filled[name] = grad
    pack([bucket.views[name] for name in filled], filled.values())
    if bucket.wire.dtype.itemsize > 2:
        bucket.handle = all_reduce(bucket.wire.mul_(1.0 / state.group.size), state.group)
    else:  # summed in float32 and divided there
        bucket.handle = mean(bucket.wire, state.group)
    state.launched += 1


def _require_plain(state: MeanState, name: str, grad: Tensor) -> None:
    if grad.layout is torch.strided and not grad.requires_grad:
        return
    fault = ValueError(
        f"parameter {name!r} has a gradient of layout {grad.layout}, requires_grad="
        f"{grad.requires_grad}; only dense gradients without a graph can be exchanged: set "
        "sparse=False on its embedding, call backward() without create_graph"
    )
    raise state.group.heartbeat.condemn(fault)


def _hand_out(state: MeanState, bucket: Bucket) -> None:
    # Flags are read only where this rank has no gradient: on a GPU each read is a wait.
    for index, (name, view) in enumerate(bucket.views.items()):
        parameter = state.site.parameters[name]
        if parameter.grad is None and not bucket.flags[index]:
            continue
        if _at_home(parameter, view):
            parameter.grad = view
        elif parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(view)
        else:
            parameter.grad.copy_(view)


def _at_home(tensor: Tensor, view: Tensor) -> bool:
    return tensor.dtype == view.dtype and tensor.device == view.device


def _like(flat: Tensor, parameter: Tensor) -> Tensor:
    """``flat`` in the shape and memory format of ``parameter``, as autograd makes gradients."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides, flat.storage_offset())
