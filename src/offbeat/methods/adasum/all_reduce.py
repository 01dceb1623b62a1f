"""Adasum of tensors, called like an all-reduce."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from offbeat.functional import Layout, pack
from offbeat.methods.adasum.adasum_update import AdasumUpdate
from offbeat.methods.adasum.method import Method, build_reduction
from offbeat.methods.adasum.participants import Participants
from offbeat.methods.adasum.slice_layout import SliceLayout
from offbeat.platform.device import is_on_host
from offbeat.transport.group import Group, message_device
from offbeat.transport.handle import Handle


def adasum_all_reduce(
    tensors: Sequence[Tensor],
    group: ProcessGroup | Group | None = None,
    *,
    wire: Literal["bf16", "fp16"] | None = None,
    method: Method = "auto",
    async_op: bool = False,
) -> Handle | None:
    r"""Combine each tensor by Adasum over the group, in place; equal on all ranks.

    .. math:: t_l \leftarrow AS(t_l^{(0)}, \ldots, t_l^{(P-1)})

    For gradients of plain SGD, or updates of any optimizer, that are combined outside of
    :func:`offbeat.replicate`. All members call with tensors of the same shapes and dtypes, in the
    same order. Exchanges of one group run one after the other, in the order of the calls, on a
    thread of the group (on CUDA: on the current stream). Point-to-point messages of the caller's
    own on the same group must not be in flight meanwhile.

    Args:
        tensors: dense floating-point tensors; each is one layer.
        group: as in ``torch.distributed``, the process group, by default the default group. Waits
            end with :class:`offbeat.PeerLost` by its timeout. Or a
            :class:`~offbeat.transport.group.Group`, with heartbeats.
        wire: dtype of the messages, None for full precision. Rounding errors are not kept.
        method: as for :class:`offbeat.methods.AdasumUpdate`.
        async_op: return a handle at once: call its ``wait()`` before the tensors are read or
            written.

    Returns:
        A :class:`~offbeat.transport.handle.Handle` with ``async_op``, else None.

    Raises:
        ValueError: on all ranks, before a tensor is changed, if one is not finite; on this rank if
            there is none, if one is not dense or not of floats, for other settings than those of
            :class:`offbeat.methods.AdasumUpdate`, and without a process group.

    Bytes sent: 2 (P-1)/P of the tensors', and inner products, as for
    :class:`offbeat.methods.AdasumUpdate`. Extra memory: twice the tensors'.

    Source: Maleki et al. 2021, section 4.

    >>> from offbeat.testing import ThreadWorld
    >>> def work(world):
    ...     group = world.opener(world.store, world.rank, world.size)  # a torch ProcessGroup
    ...     tensor = torch.tensor([1.0, float(world.rank)])
    ...     adasum_all_reduce([tensor], group)
    ...     return tensor
    >>> ThreadWorld(2).run(work)
    [tensor([1.2500, 0.7500]), tensor([1.2500, 0.7500])]
    """
    AdasumUpdate(wire=wire, method=method)  # refuses what it does not know
    members = group if isinstance(group, Group) else Group.of(group)
    named = {str(index): tensor.detach() for index, tensor in enumerate(tensors)}
    wrong = next(filter(None, map(_fault, named.values())), None)
    if wrong or not named:
        raise ValueError(
            f"adasum_all_reduce got {len(named)} tensors{', one ' + wrong if wrong else ''}; "
            "pass one or more dense tensors of floats"
        )
    layout = Layout.of(named, members.size)
    flat = layout.empty(message_device(members, next(iter(named.values())).device))
    pack(layout.views(flat).values(), named.values())
    on_lane = is_on_host(flat[0])  # streams keep the order there, on the calling thread
    peers = Participants(members.size, members, on_lane=on_lane)
    algorithm = build_reduction(method, SliceLayout(layout, peers), flat, wire)

    def run() -> None:
        with torch.no_grad():
            statistics = algorithm.compare()
            if not statistics.is_finite():
                raise ValueError(
                    f"tensor {statistics.first_nonfinite()} is not finite on some rank, or too "
                    "large to be combined; no tensor was changed: skip this step on all ranks"
                )
            algorithm.combine()
            pack(named.values(), layout.views(flat).values())

    job = members.lane.submit(run) if on_lane else None
    if job is None:
        run()
    handle = Handle(members, buffers=list(flat), future=job)
    if async_op:
        return handle
    handle.wait()
    return None


def _fault(tensor: Tensor) -> str | None:
    if not tensor.is_floating_point():
        return f"of {tensor.dtype}"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return "an expanded view" if any(n > 1 and not stride for n, stride in strides) else None
