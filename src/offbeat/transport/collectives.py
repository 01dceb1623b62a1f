"""Collectives: every function is called by all members of its group and returns a handle.

Measured on Gloo (torch 2.13, CPU): a 16-bit all-reduce errs by 2 to 3 units of 2^-8, because every
hop rounds. :func:`mean` casts once, sums in float32 and rounds once. Staged pairwise exchange is
also faster there than all_to_all_single (169 ms against 227 where 150 are ideal).

An all-gather waits for a round trip at each hop of its ring, and for one if all members send to all
at once: 80 bytes between 4 nodes take 4 ms and 1.6, between 8 nodes 11 and 5, and between 8 nodes
50 ms apart 352 and 51. The ring is faster for 512 KiB, since its senders share no link.

Where a pair has several connections, large tensors are divided among them; an all-gather then
copies its result once more.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, ReduceOptions

from offbeat.platform.device import has_streams
from offbeat.platform.process_group import all_gather_flat, all_to_all_flat
from offbeat.transport.group import Group, message_device
from offbeat.transport.handle import Handle
from offbeat.transport.messages import SHARE, exchange_with_all

AT_ONCE = 2**17  # bytes that a member of a small group sends to all others without a ring, at most
_Arguments = ParamSpec("_Arguments")


def _watched(launch: Callable[_Arguments, Handle]) -> Callable[_Arguments, Handle]:
    """Replace an error of the launch, where a lost rank may show already; note arrivals."""

    @functools.wraps(launch)
    def launch_watched(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Handle:
        group = next(arg for arg in args if isinstance(arg, Group))
        with group.detector.explaining():
            handle = launch(*args, **kwargs)
        if group.meter.spans is not None:
            handle.noted = handle.works[-1].get_future().then(handle.note_arrival)
        return handle

    return launch_watched


@_watched
def all_reduce(tensor: Tensor, group: Group) -> Handle:
    """Sum ``tensor`` over the group, in place. Sends 2 (n-1)/n of its bytes."""
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.SUM)
    works = [group.process_group.allreduce([part], options) for part in _parts(tensor, group)]
    group.meter.sent(group.axis, 2 * (group.size - 1) * tensor.nbytes // group.size)
    return Handle(group, works, [tensor])


def all_reduce_at_once(tensor: Tensor, group: Group) -> None:
    """Sum ``tensor`` over the group, in place, and wait: equal on all members bit for bit.

    In a small group each member adds a part, which all others send to it at once, and sends the sum
    to all: two round trips in place of 2 (n-1), for members far from each other. On near links,
    which senders then share, it takes up to 1.5 times as long. Sends 2 (n-1)/n of the bytes, and
    takes memory for three more tensors.
    """
    if not group.is_mesh or group.backend(tensor.device) != "gloo":
        all_reduce(tensor, group).wait()
        return
    size, numel, lanes = group.size, tensor.numel(), len(_parts(tensor, group))
    part = -(-numel // (lanes * size))
    blocks = tensor.new_zeros(lanes, size, part)  # one for each connection, of all members' parts
    blocks.view(-1)[:numel] = tensor
    arrived = torch.empty_like(blocks)
    _to_all(arrived, blocks, group).wait()
    total = arrived[:, 0].clone()
    for member in range(1, size):
        total += arrived[:, member]
    _to_all(blocks, total[:, None].expand_as(blocks).contiguous(), group).wait()
    tensor.copy_(blocks.view(-1)[:numel])


@_watched
def _to_all(out: Tensor, blocks: Tensor, group: Group) -> Handle:
    each = zip(out.flatten(1), blocks.flatten(1), strict=True)
    works = [all_to_all_flat(group.process_group, arrives, sent) for arrives, sent in each]
    group.meter.sent(group.axis, (group.size - 1) * blocks.nbytes // group.size)
    return Handle(group, works, [out, blocks])


@_watched
def reduce(tensor: Tensor, root: int, group: Group) -> Handle:
    """Sum ``tensor`` into that of the member ``root``; others' are overwritten. Sends it once."""
    options = ReduceOptions()
    options.reduceOp, options.rootRank, options.rootTensor = ReduceOp(ReduceOp.SUM), root, 0
    works = [group.process_group.reduce([part], options) for part in _parts(tensor, group)]
    group.meter.sent(group.axis, tensor.nbytes if group.rank != root else 0)
    return Handle(group, works, [tensor])


@_watched
def all_gather(out: Tensor, tensor: Tensor, group: Group) -> Handle:
    """Fill ``out`` (n * m) with every member's ``tensor`` (m). Sends n-1 times its bytes.

    Both are contiguous and of one dtype; ``tensor`` may be this rank's own part of ``out``. It goes
    around a ring; where that is 128 KiB or less in a small group, to all at once, from n copies.
    """
    nbytes = (group.size - 1) * tensor.nbytes
    group.meter.sent(group.axis, nbytes)
    if nbytes <= AT_ONCE and group.is_mesh and group.backend(tensor.device) == "gloo":
        sent, received = (each.view(-1).view(torch.uint8) for each in (tensor, out))
        work = all_to_all_flat(group.process_group, received, sent.repeat(group.size))
        return Handle(group, [work], [out])
    mine = _parts(tensor, group)
    if len(mine) == 1:
        work = all_gather_flat(group.process_group, out, tensor)
        return Handle(group, [work], [out, tensor])
    rows = [_parts(row, group) for row in out.view(group.size, -1)]
    outs = map(list, zip(*rows, strict=True))
    works = [group.process_group.allgather([o], [m]) for o, m in zip(outs, mine, strict=True)]
    return Handle(group, works, [out, tensor])


@_watched
def broadcast(tensor: Tensor, root: int, group: Group) -> Handle:
    """Copy ``tensor`` from the member ``root``, in place. Each byte arrives once per member.

    Contiguous, of any dtype: it is sent as bytes.
    """
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    flat = tensor.view(-1).view(torch.uint8)
    works = [group.process_group.broadcast([part], options) for part in _parts(flat, group)]
    group.meter.sent(group.axis, tensor.nbytes)
    return Handle(group, works, [tensor])


def _parts(tensor: Tensor, group: Group) -> Sequence[Tensor]:
    """Return a large tensor in equal parts, one or two for each connection of a pair.

    Of two, one passes while the other waits for word of its next receive: at a round trip of 100 ms
    and a loss of 0.1 %, an all-reduce of 6.4 MB over 8 connections took 2.2 s instead of 2.5.
    """
    count = group.connections
    if count == 1 or tensor.nbytes <= SHARE * count:
        return [tensor]
    return tensor.view(-1).chunk(2 * count if tensor.nbytes > 2 * SHARE * count else count)


def copy_from_first(tensors: Iterable[Tensor], group: Group) -> None:
    """Copy all ``tensors`` from the first member to the others, in place; all members call."""
    copies = []
    for tensor in tensors:
        message = tensor.detach().to(message_device(group, tensor.device)).contiguous()
        copies.append((tensor.detach(), message, broadcast(message, 0, group)))
    for tensor, message, handle in copies:
        handle.wait()
        if group.rank != 0:
            tensor.copy_(message)


def mean(
    tensor: Tensor,
    group: Group,
    carry: Tensor | None = None,
    shares: Sequence[float] | None = None,
) -> Handle:
    """Average ``tensor`` over the group, in place, equal on all members bit for bit.

    ``shares`` are those of the members, by default equal ones.

    16-bit tensors are summed in float32 and rounded once, at the same 2 (n-1)/n of their bytes
    and n/(n-1) of their memory; wider ones go through one all-reduce. ``carry`` is added to this
    member's chunk of a 16-bit mean (:func:`chunk_of_mean`), and then holds what rounding took.
    """
    if tensor.dtype.itemsize > 2:
        if shares is not None:
            return all_reduce(tensor.mul_(shares[group.rank]), group)
        handle = all_reduce(tensor, group)
        handle.after = lambda: tensor.div_(group.size)
        return handle
    if has_streams(tensor.device):  # streams keep the order: nothing here blocks the host
        _mean_16bit(tensor, group, carry, shares)
        return Handle(group, [], [tensor])
    job = group.lane.submit(_mean_16bit, tensor, group, carry, shares)
    return Handle(group, buffers=[tensor], future=job)


def chunk_of_mean(numel: int, group: Group) -> slice:
    """Return the part of a 16-bit tensor whose :func:`mean` this member computes for all."""
    chunk = -(-numel // group.size)
    return slice(min(group.rank * chunk, numel), min((group.rank + 1) * chunk, numel))


def peers_of_mean(tensors: Iterable[Tensor]) -> tuple[()] | None:
    """Return whom :func:`mean` of ``tensors`` sends messages beside collectives: none, or any."""
    return None if any(tensor.dtype.itemsize <= 2 for tensor in tensors) else ()


def _mean_16bit(
    tensor: Tensor, group: Group, carry: Tensor | None, shares: Sequence[float] | None
) -> None:
    rank, size = group.rank, group.size
    chunk = -(-tensor.numel() // size)
    padded = tensor.new_zeros(size * chunk)
    padded[: tensor.numel()] = tensor
    parts = padded.view(size, chunk)
    arrived = torch.empty_like(parts)
    arrived[rank] = parts[rank]
    # Point-to-point messages only, no collective: they run on the group's own thread while the
    # training thread launches collectives on the same group, and the order of both would depend
    # on the clock. A rank that launched ours first would pair it with another's all-reduce.
    exchange_with_all(parts, arrived, group)
    wide = arrived.float()
    total = wide.mean(0) if shares is None else wide.T @ wide.new_tensor(shares)
    if carry is None:
        parts[rank] = total
    else:
        total[: len(carry)].add_(carry)
        parts[rank] = total
        torch.sub(total, parts[rank], out=total)
        # A mean that is not finite leaves nothing to carry: inf - inf would stay.
        carry.copy_(total[: len(carry)].nan_to_num(0.0, 0.0, 0.0))
    exchange_with_all([parts[rank]] * size, parts, group)
    tensor.copy_(padded[: tensor.numel()])
