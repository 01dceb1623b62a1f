"""What a rank that joins gets from its donor: the model, half of the weight, and its place."""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.exchange import Exchanged
from offbeat.liveness.failure import Phase
from offbeat.transport.group import Group, message_device
from offbeat.transport.messages import exchange


class StartingPoint(NamedTuple):
    """Where a rank that joins begins.

    Attributes:
        steps: the number of steps that the others have made.
        weight: its push-sum weight.
        phase: the place of the others in their sequence of calls.
    """

    steps: int
    weight: float
    phase: Phase


def give(model: Exchanged, place: StartingPoint, rank: int, group: Group) -> None:
    """Send the model and ``place`` to ``rank``, which calls :func:`take`.

    Bytes sent: those of the parameters and of the persistent buffers, and 48.
    """
    tensors, phase, to = _tensors(model), place.phase, group.ranks.index(rank)
    numbers = [place.steps, place.weight, phase.calls, phase.steps, phase.exchanges, _sum(tensors)]
    header = torch.tensor(numbers, dtype=torch.float64, device=message_device(group))
    sent = [t.detach().to(message_device(group, t.device)).contiguous() for t in tensors.values()]
    for messages in ([header], sent):  # two exchanges: messages of one are numbered
        exchange([(to, message.view(-1)) for message in messages], [], group).wait()


def take(model: Exchanged, donor: int, group: Group) -> StartingPoint:
    """Receive what ``donor`` gives; the parameters and buffers are then equal to its own.

    Raises ``ValueError`` if it has other buffers than this rank.
    """
    tensors, source = _tensors(model), group.ranks.index(donor)
    header = torch.zeros(6, dtype=torch.float64, device=message_device(group))
    exchange([], [(source, header)], group).wait()
    steps, weight, calls, phase_steps, exchanges, found = header.tolist()
    if found != _sum(tensors):
        raise ValueError(
            f"rank {donor} has buffers of other names, shapes or dtypes than this rank that "
            "joins; register them before replicate(), alike on all ranks"
        )
    got = [torch.empty_like(t, device=message_device(group, t.device)) for t in tensors.values()]
    got = [message.contiguous() for message in got]
    exchange([], [(source, message.view(-1)) for message in got], group).wait()
    with torch.no_grad():
        for tensor, message in zip(tensors.values(), got, strict=True):
            tensor.copy_(message)
    return StartingPoint(
        int(steps), weight, Phase(int(calls), "", int(phase_steps), int(exchanges))
    )


def _tensors(model: Exchanged) -> dict[str, Tensor]:
    """Return parameters and persistent buffers that hold something, by name."""
    persistent = model.module.state_dict(keep_vars=True)
    tensors = sorted({**model.parameters, **model.buffers}.items())
    return {name: t for name, t in tensors if name in persistent and t.numel() > 0}


def _sum(tensors: dict[str, Tensor]) -> int:
    kinds = [(name, [*tensor.shape], str(tensor.dtype)) for name, tensor in tensors.items()]
    return zlib.crc32(repr(kinds).encode())
