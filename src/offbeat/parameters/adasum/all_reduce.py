"""Adasum of tensors by hand, as an all-reduce would sum them."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from offbeat.comm.group import Group, message_device
from offbeat.comm.handle import Handle
from offbeat.functional import Layout, pack
from offbeat.parameters.adasum.method import Method, build_reduction
from offbeat.parameters.adasum.participants import Participants
from offbeat.parameters.adasum.slice_layout import SliceLayout


def adasum_all_reduce(
    tensors: Sequence[Tensor],
    group: Group,
    *,
    wire: Literal["bf16", "fp16"] | None = None,
    method: Method = "auto",
    async_op: bool = False,
) -> Handle | None:
    r"""Replace each tensor by its Adasum over the group, in place; equal on all ranks.

    .. math:: t_l \leftarrow AS(t_l^{(0)}, \ldots, t_l^{(P-1)})

    For those who combine by hand, with clipping and so on in between; gradients of plain SGD, or
    updates of any optimizer. All members call with tensors of the same shapes and dtypes, in the
    same order. With ``async_op`` returns a handle at once: ``wait()`` on it before the tensors are
    read or written. Exchanges of one group run one after the other, in the order of the calls.

    ``group`` is one of offbeat's, whose waits end: ``Links.connect(World.discover())`` opens
    them, ``.open("world")`` one over all ranks. ``wire`` and ``method`` as for
    :class:`offbeat.parameters.AdasumUpdate`; what rounding to 16 bits takes is lost here.

    Bytes sent: 2 (P-1)/P of the tensors', and 8 P^2 a tensor, to each
    of the others while that is little. Extra memory: twice the tensors'.
    Raises ``ValueError`` on all ranks, before a tensor is changed, if one is not finite, if there
    is none, or if one is not of floats. Source: Maleki et al. 2021, section 4.

    >>> from offbeat.comm.links import Links
    >>> from offbeat.testing import ThreadWorld
    >>> def work(world):
    ...     links = Links.connect(world)
    ...     tensor = torch.tensor([1.0, float(world.rank)])
    ...     adasum_all_reduce([tensor], links.open("world"))
    ...     links.close()
    ...     return tensor
    >>> ThreadWorld(2).run(work)
    [tensor([1.2500, 0.7500]), tensor([1.2500, 0.7500])]
    """
    named = {str(index): tensor.detach() for index, tensor in enumerate(tensors)}
    wrong = [str(t.dtype) for t in named.values() if not t.is_floating_point()]
    if wrong or not named:
        raise ValueError(
            f"adasum_all_reduce got {len(named)} tensors{', of ' + wrong[0] if wrong else ''}; "
            "pass one or more tensors of floats"
        )
    layout = Layout.of(named, group.size)
    flat = layout.empty(message_device(group, next(iter(named.values())).device))
    pack(layout.views(flat).values(), named.values())
    on_lane = not flat[0].is_cuda  # streams keep the order there, on the calling thread
    algorithm = build_reduction(
        method, SliceLayout(layout, Participants(group.size, group, on_lane=on_lane)), flat, wire
    )

    def run() -> None:
        with torch.no_grad():
            statistics = algorithm.compare()
            if not statistics.is_finite():
                index = int((~statistics.energy.isfinite()).nonzero()[0])
                raise ValueError(
                    f"tensor {index} is not finite on some rank, or too large to be combined; no "
                    "tensor was changed: skip this step on all ranks"
                )
            algorithm.combine()
            pack(named.values(), layout.views(flat).values())

    if on_lane:
        handle = Handle(group, buffers=list(flat), future=group.lane.submit(run))
    else:
        run()
        handle = Handle(group, buffers=list(flat))
    if async_op:
        return handle
    handle.wait()
    return None
