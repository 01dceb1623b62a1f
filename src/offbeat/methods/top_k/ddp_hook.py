"""LAGS-SGD as a communication hook of torch's DistributedDataParallel."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.exchange import Exchanged, Saved
from offbeat.exchange.engine.feedback import Feedback
from offbeat.exchange.engine.units import Units
from offbeat.functional import accumulation_dtype, extract, flat_view
from offbeat.kernels.dispatch import Select
from offbeat.methods.top_k.density import OfLayer
from offbeat.methods.top_k.payload import PayloadFormat, kept_entries
from offbeat.methods.top_k.top_k import TopK
from offbeat.transport.collectives import all_gather, all_reduce
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle, when_arrived
from offbeat.transport.small_gathers import raise_alike

__all__ = ["LagsState", "lags_hook"]


class LagsState:
    """State of :func:`lags_hook` on one rank: the residual of every layer, by name.

    :meth:`state_dict` has this rank's residuals under ``rank<r>``; save it on every rank, between
    steps. Another world size takes all ranks' parts, ``{**one, **another}``, and keeps the mean.
    Extra memory: two models.

    Args:
        model: the module, or the DistributedDataParallel that wraps it.
        density: as for :func:`offbeat.lags`, but for "adaptive".
        selection: as for :func:`offbeat.lags`.
        units: as for :class:`offbeat.methods.TopK`.
        optimizer: as for :func:`offbeat.replicate`.
        scaler: as for :func:`offbeat.replicate`.
        process_group: that of the DistributedDataParallel, by default the default group.

    Raises:
        ValueError: for invalid settings, and when loading the state of another model.
    """

    def __init__(
        self,
        model: nn.Module,
        density: float | Mapping[str, float] | OfLayer = 0.001,
        selection: Literal["sampled", "exact"] | Select = "sampled",
        units: Literal["lr", "gradient"] | None = None,
        *,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        scaler: torch.amp.GradScaler | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.exchange = TopK(density=density, selection=selection, units=units)
        if isinstance(density, str):
            raise ValueError("density='adaptive' needs offbeat.replicate(); pass numbers here")
        exchanged = Exchanged(model.module if isinstance(model, DistributedDataParallel) else model)
        parameters = exchanged.trained
        if exchanged.sparse or not parameters:
            found = f"sparse gradients of {sorted(exchanged.sparse)}" if parameters else "none"
            raise ValueError(
                f"LagsState exchanges dense gradients of trained parameters, got {found}"
            )
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if unfit := self.exchange.fault(parameters, optimizers):
            raise ValueError(unfit)
        self.densities = self.exchange.densities_of(parameters)
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.units = Units.of(parameters, optimizers, scaler, units)
        self.process_group = process_group  # a Group does not keep it alive
        self.group = Group.of(process_group)
        self.residual = {
            name: Feedback(parameters, [name])
            for name, parameter in parameters.items()
            if self.count_kept(name, parameter)
        }
        self.select = self.exchange.select_on(next(iter(parameters.values())).device)
        self.touched: set[str] = set()  # whose next residual belongs to the last backward
        self.is_finite: list[Tensor] = []  # whether what the last backward's buckets brought is

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter; ``ValueError`` if it was not trained at the start."""
        if (name := self.names.get(id(parameter))) is None:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} was frozen, or another one, when "
                "LagsState was made; make it after the DistributedDataParallel"
            )
        return name

    def count_kept(self, name: str, layer: Tensor) -> int:
        """Return how many entries of a layer are sent; 0 if all are, because that costs no more."""
        return kept_entries(layer.numel(), self.densities[name], layer.dtype, self.group.size)

    def resolve(self) -> None:
        """Keep the residuals of the last backward if all that it sent was finite, or none."""
        if all(self.is_finite):
            for name in self.touched:
                self.residual[name].commit()
                self.residual[name].resolve((), (), is_last=True)
        self.touched.clear()
        self.is_finite.clear()

    def state_dict(self) -> Saved:
        """Return this rank's residuals; no communication."""
        self.resolve()
        residual = {name: kept.latest[name].clone() for name, kept in self.residual.items()}
        return {f"rank{self.group.rank}": {"size": self.group.size, "residual": residual}}

    def load_state_dict(self, saved: Saved) -> None:
        """Load residuals; all ranks call, before the next backward.

        Raises ``ValueError`` on all ranks alike if those of any rank do not fit.
        """
        residual, fault = {}, None
        try:
            residual = self._inherited(saved)
        except ValueError as error:
            fault = str(error)
        raise_alike(fault, self.group)
        self.resolve()
        for name, kept in self.residual.items():
            kept.latest[name].zero_()
            if name in residual:
                kept.latest[name].copy_(residual[name])

    def _inherited(self, saved: Saved) -> dict[str, Tensor]:
        """Return the residuals that this rank takes over."""
        parts = _parts(saved)
        shapes = [{n: r.shape for n, r in part["residual"].items()} for part in parts.values()]
        if any(other != shapes[0] for other in shapes):
            raise ValueError(f"the residuals of ranks {list(parts)} are of different models")
        before = next(iter(parts.values()))["size"]
        own = self.exchange.inherit(parts, before, self.group.rank, self.group.size)
        residual: dict[str, Tensor] = own["residual"]
        # Which layers are sparse depends on the number of ranks: a residual may be missing, none
        # may be lost.
        for name, tensor in residual.items():
            shape = tuple(tensor.shape)
            if name not in self.residual or self.residual[name].latest[name].shape != shape:
                raise ValueError(
                    f"there is a residual {shape} for {name!r}, but no sparse layer of that "
                    "name and shape here; load it with the same model and density"
                )
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise ValueError(f"the residual of {name!r} is not finite; load an earlier state")
        return residual


def _parts(saved: Saved) -> dict[int, Saved]:
    """Return the part of each rank; raise ``ValueError`` for what is none."""
    if not isinstance(saved, dict) or not saved:
        raise ValueError(f"cannot load {ascii(saved)[:60]}; pass what state_dict() returned")
    for key, part in saved.items():
        residual = part.get("residual") if isinstance(part, dict) else None
        if (
            not re.fullmatch(r"rank\d+", str(key))
            or not isinstance(residual, dict)
            or type(part.get("size")) is not int
            or not all(isinstance(r, Tensor) and not r.is_meta for r in residual.values())
        ):
            raise ValueError(
                f"cannot load {ascii(part)[:60]} as {key!a}; pass what state_dict() returned"
            )
    return {int(key.removeprefix("rank")): part for key, part in saved.items()}


def lags_hook(state: LagsState, bucket: GradBucket) -> Future[Tensor]:
    r"""Communicate the largest entries of every layer of a bucket; keep the others as residual.

    .. math::
        g = \frac{1}{P} \sum_p TopK(\epsilon_p + \alpha G_p, k^{(l)}) / \alpha

    The counterpart of :func:`offbeat.lags` for programs that use DistributedDataParallel:
    ``ddp.register_comm_hook(LagsState(ddp), lags_hook)``. Buckets may be rebuilt: no state is
    kept by bucket. A gradient that is not finite reaches all ranks, and all then keep their former
    residuals. Gradients must be zeroed between backwards that synchronize. A gradient that is
    discarded stays in the residual: use ``no_sync()`` in its backward. For a layer whose
    gradient is zero, a rank sends zeros and keeps its residual.

    Bytes sent per step: those of :class:`offbeat.methods.TopK`, with 8 for each bucket as flags.

    Source: Shi et al. 2020, Algorithm 1.
    """
    if bucket.index() == 0:  # the hook is not called at the end of a backward
        state.resolve()
        state.units.read()
    buffer, group = bucket.buffer(), state.group
    first = int(buffer.storage_offset())
    sparse, whole = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        flat = flat_view(grad)
        assert flat is not None, "buckets hold gradients without gaps"
        name = state.name_of(parameter)
        if k := state.count_kept(name, parameter):
            values, chosen = _select(state, name, grad, k)
            sparse.append((values, chosen + (int(flat.storage_offset()) - first)))
        else:
            whole.append(flat)
    dense = torch.cat([*whole, buffer[:0]]).div_(group.size)
    count = sum(chosen.numel() for _, chosen in sparse)
    form = PayloadFormat(count, 0, buffer.dtype, None)
    gathered, rows = form.allocate(group.size, buffer.device)
    # Both launched here and never from a future's callback, where ranks would launch them in
    # different orders: Gloo would pair an all-gather with an all-reduce, and crash.
    handles: list[Handle] = []
    if sparse:
        mine = rows[group.rank]
        values, chosen = map(torch.cat, zip(*sparse, strict=True))
        mine.put(values.div_(group.size))
        mine.indices.copy_(chosen)
        mine.flags[-1:] = values.isfinite().all().logical_not_()
        handles.append(all_gather(gathered, mine.words, group))
    if dense.numel():
        handles.append(all_reduce(dense, group))

    def combine() -> Tensor:
        exact = buffer.zero_().dtype == accumulation_dtype(buffer.dtype)
        total = buffer if exact else torch.zeros_like(buffer, dtype=torch.float32)
        # One by one: ranks must add in the same order, or their results differ by rounding.
        for row in rows if sparse else ():
            total.index_add_(0, row.indices, row.read(total))
            state.is_finite.append(row.flags[-1] == 0)
        buffer.copy_(total)  # nothing, if they are one
        for flat, part in zip(whole, dense.split([flat.numel() for flat in whole]), strict=True):
            flat.copy_(part)
        state.is_finite.append(dense.sum(dtype=torch.float64).isfinite())
        return buffer

    return when_arrived(handles, combine)


def _select(state: LagsState, name: str, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what is sent of a layer, in units of the gradient, and its positions."""
    residual, scale = state.residual[name], state.units.scales[name]
    torch.add(residual.latest[name], grad, alpha=scale.to_residual, out=residual.next.views[name])
    state.touched.add(name)
    acc = residual.next.whole
    chosen = state.select(acc, [(0, acc.numel(), k)])
    if not scale.to_grad:  # zeros, unless one is not finite
        return acc[chosen].mul_(scale.to_grad), chosen
    values = extract(acc, chosen)
    # Where no rank has used the parameter, DDP drops what arrives: one without a gradient, which
    # is zero here, sends zeros and keeps its residual.
    is_used = grad.any()
    acc.index_copy_(0, chosen, torch.where(is_used, 0.0, values))
    return torch.where(is_used, values, 0.0).mul_(scale.to_grad), chosen
