"""What a rank that joins, or misses a result, gets from its donor, bit for bit."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.attach.slots import SlotFiller
from offbeat.elastic.agreement import Agreement
from offbeat.elastic.portable import put_together, room_for, taken_apart
from offbeat.exchange import Exchanged
from offbeat.exchange.sharding import load_parts
from offbeat.liveness.failure import PeerLost
from offbeat.transport.group import Group, message_device
from offbeat.transport.messages import exchange

Healed = dict[str, Any]
SCHEDULED = {  # settings of optimizers that the schedules of torch write
    "lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum",
}  # fmt: skip


def give(
    tensors: Mapping[str, Tensor], state: Callable[[], Mapping[str, Any]], rank: int, group: Group
) -> None:
    """Send the ``tensors`` of a model and what ``state`` returns to ``rank``, which :func:`take` s.

    That is what :func:`~offbeat.elastic.portable.taken_apart` can take apart; what it cannot, and a
    ``ValueError`` of ``state``, is an error of the newcomer. Bytes sent: those of all tensors, and
    some hundreds for each name in the state.
    """
    to, fault = group.ranks.index(rank), None
    try:
        text, more = taken_apart(dict(state()))
    except ValueError as error:
        text, more, fault = "null", [], str(error)
    word = json.dumps([fault, _kinds(tensors), text]).encode()
    held = [*tensors.values(), *more] if fault is None else []
    sent = [t.detach().to(message_device(group, t.device)).contiguous() for t in held]
    head = torch.frombuffer(bytearray(word), dtype=torch.uint8)
    for messages in [torch.tensor([len(word)])], [head], sent, [torch.tensor([_checksum(sent)])]:
        _send(messages, to, group)


def take(tensors: Mapping[str, Tensor], donor: int, group: Group) -> dict[str, Any]:
    """Receive what ``donor`` gives; ``tensors`` are then equal to its own.

    Returns the state. Before anything is written, raises ``ValueError`` if the donor has other
    buffers than this rank or a state that cannot be sent, and :class:`PeerLost` if something was
    damaged on the way: then this rank tries again.
    """
    source = group.ranks.index(donor)
    length = torch.zeros(1, dtype=torch.int64)
    _receive([length], source, group)
    word = torch.empty(int(length), dtype=torch.uint8)
    _receive([word], source, group)
    fault, kinds, text = json.loads(word.numpy().tobytes())
    if fault is not None:
        raise ValueError(f"rank {donor} cannot hand over its state: {fault}")
    if kinds != _kinds(tensors):
        raise ValueError(
            f"rank {donor} has buffers of other names, shapes or dtypes than this rank that "
            "joins; register them before replicate(), alike on all ranks"
        )
    like = [*tensors.values(), *room_for(text)]
    got = [torch.empty_like(t, device=message_device(group, t.device)).contiguous() for t in like]
    _receive(got, source, group)
    found = torch.zeros(1, dtype=torch.int64)
    _receive([found], source, group)
    if int(found) != _checksum(got):
        raise PeerLost(f"what rank {donor} has handed over was damaged on the way")
    with torch.no_grad():
        for tensor, message in zip(tensors.values(), got, strict=False):
            tensor.copy_(message)
    state: dict[str, Any] = put_together(text, got[len(tensors) :])
    return state


def heal(
    made: Callable[[Agreement], Healed], control: Group | None, agreed: Agreement
) -> Healed | None:
    """Hand over what the donor has ``made`` of the result; all living ranks call.

    Returns it on a rank that is behind, and None on others. Bytes sent: its own, to each one
    behind.
    """
    healed = None
    if control is None:
        return None
    here = control.ranks[control.rank]
    for rank in agreed.behind:
        if here == agreed.donor:
            give({}, lambda: made(agreed), rank, control)
        elif here == rank:
            healed = take({}, agreed.donor, control)
    return healed


def made_of_gradients(filler: SlotFiller, agreed: Agreement) -> Healed:
    """Return "gradients", or "parameters" and "optimizers" for :func:`go_on_with` after a step."""
    trained = filler.model.trained
    if agreed.has_gradients:
        return {"gradients": {name: parameter.grad for name, parameter in trained.items()}}
    return {"parameters": trained, "optimizers": filler.common()["optimizers"]}


def go_on_with(filler: SlotFiller, healed: Healed) -> None:
    """Take over parameters and what optimizers hold, but not what schedules set.

    Those have made the step here too.
    """
    with torch.no_grad():
        for name, parameter in filler.model.trained.items():
            parameter.copy_(healed["parameters"][name])
    for optimizer, state in zip(filler.optimizers, healed["optimizers"], strict=True):
        own = optimizer.state_dict()["param_groups"]
        groups = [
            theirs | {key: mine[key] for key in SCHEDULED & mine.keys()}
            for theirs, mine in zip(state["param_groups"], own, strict=True)
        ]
        load_parts(optimizer, state | {"param_groups": groups})


def tensors_of(model: Exchanged) -> dict[str, Tensor]:
    """Return what this rank holds of parameters and persistent buffers, by name."""
    persistent = model.module.state_dict(keep_vars=True)
    tensors = sorted({**model.held, **model.buffers}.items())
    return {name: t for name, t in tensors if name in persistent and t.numel() > 0}


def _kinds(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    return [[name, [*tensor.shape], str(tensor.dtype)] for name, tensor in tensors.items()]


def _send(messages: Sequence[Tensor], to: int, group: Group) -> None:
    # One exchange after the other: messages of one are numbered.
    exchange([(to, bits) for bits in _bits(messages, group)], [], group).wait()


def _receive(messages: Sequence[Tensor], source: int, group: Group) -> None:
    parts = _bits(messages, group)
    exchange([], [(source, part) for part in parts], group).wait()
    filled = (message for message in messages if message.numel() > 0)
    for message, part in zip(filled, parts, strict=True):
        if message.device != part.device:
            message.view(-1).view(torch.uint8).copy_(part)


def _bits(messages: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return the bytes of contiguous tensors that are not empty, on the device of messages."""
    flat = [message.view(-1).view(torch.uint8) for message in messages if message.numel() > 0]
    return [part.to(message_device(group, part.device)) for part in flat]


def _checksum(messages: Sequence[Tensor]) -> int:
    """Return the CRC-32 of all bytes: one pass over memory."""
    crc = 0
    for message in messages:
        crc = zlib.crc32(message.view(-1).view(torch.uint8).cpu().numpy().data, crc)
    return crc
