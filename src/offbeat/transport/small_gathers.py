"""Small values that the members of a group gather, to compare or to combine.

Every gather begins with a block of one size, which names the call that its member is in. Ranks in
different calls thus read each other's block, and not numbers of another meaning or a message of
another size, on which Gloo aborts the process. Where there is no group, a rank is the only member.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.liveness.failure import SAME, Phase
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device

_ROOM = 4  # numbers in a block
_NUMBERS = struct.Struct(f"{_ROOM}d")
_TEXT = struct.Struct("q24s")  # its size, and its beginning
_BLOCK = struct.Struct(f"3q24s{_NUMBERS.size}s")
_ANY = -1  # the length of what differs in length between members


class _Block(NamedTuple):
    """What one member sends first: the call it is in, and the beginning of what it has to say."""

    phase: Phase
    length: int
    said: bytes


def gather_bytes(payload: bytes, group: Group | None) -> list[bytes]:
    """Gather every member's ``payload``, of any lengths.

    One small all-gather if none is longer than 24 bytes, two otherwise.
    """
    if group is None:
        return [payload]
    blocks = _gather_blocks(_ANY, _TEXT.pack(len(payload), payload[:24]), group)
    said = [_TEXT.unpack(block.said) for block in blocks]
    sizes, rows = [size for size, _ in said], [begun for _, begun in said]
    if max(sizes) > 24:
        rows = _gather(payload, max(sizes), group)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def gather_numbers(numbers: Sequence[float], group: Group | None) -> list[tuple[float, ...]]:
    """Gather every member's ``numbers`` as float64, equally many each.

    One small all-gather for up to 4 numbers, two for more. Raises ``ValueError`` on all members
    if one of them is in another call.
    """
    if group is None:
        return [tuple(numbers)]
    if len(numbers) > _ROOM:
        mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return [tuple(row) for row in gather_rows(mine, group).tolist()]
    said = _NUMBERS.pack(*numbers, *[0.0] * (_ROOM - len(numbers)))
    blocks = _gather_blocks(len(numbers), said, group)
    return [_NUMBERS.unpack(block.said)[: len(numbers)] for block in blocks]


def gather_rows(row: Tensor, group: Group) -> Tensor:
    """Gather every member's ``row`` (m) as float64, on the host; return them all (n, m).

    Two small all-gathers. Raises ``ValueError`` on all members if one of them is in another call.
    """
    _gather_blocks(row.numel(), b"", group)
    rows = _gather(row.double().cpu().numpy().tobytes(), 8 * row.numel(), group)
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.float64).view(len(rows), -1)


def raise_alike(fault: str | None, group: Group | None) -> None:
    """Raise ``ValueError`` on all ranks if any has a ``fault``, with the first such rank's text.

    All members call, those without a fault with None.
    """
    faults = gather_bytes((fault or "").encode(), group)
    ranks = (None,) if group is None else group.ranks
    for rank, text in zip(ranks, faults, strict=True):
        if text:
            where = "" if rank is None else f"rank {rank}: "
            raise ValueError(where + text.decode())


def _gather_blocks(length: int, said: bytes, group: Group) -> list[_Block]:
    """Gather the calls of all members, which must be the same, and what each has ``said``."""
    phase = group.detector.phase
    head = phase.calls, phase.steps, length, phase.verb.encode()
    blocks = []
    for row in _gather(_BLOCK.pack(*head, said), _BLOCK.size, group):
        calls, steps, size, verb, there = _BLOCK.unpack(row)
        phase = Phase(calls, verb.rstrip(b"\0").decode(), steps)
        blocks.append(_Block(phase, size, there))
    _require_same_call(blocks, group)
    return blocks


def _require_same_call(blocks: Sequence[_Block], group: Group) -> None:
    places = [(block.phase.calls, block.phase.verb, block.length) for block in blocks]
    other = next((index for index, place in enumerate(places) if place != places[0]), None)
    if other is None:
        return
    first, phase = blocks[0].phase, blocks[other].phase
    if first.verb == phase.verb and first.steps != phase.steps:
        raise group.detector.report_error(
            ValueError(
                f"{first.verb}() was called after different numbers of steps: "
                f"{[block.phase.steps for block in blocks]} by rank; call step() equally often on "
                "all ranks"
            )
        )
    raise group.detector.report_error(
        ValueError(
            f"rank {group.ranks[other]} is in {phase}, but rank {group.ranks[0]} is in {first}; "
            + SAME
        )
    )


def _gather(payload: bytes, length: int, group: Group) -> list[bytes]:
    """Gather payloads that are padded to ``length`` bytes."""
    device, length = message_device(group), max(1, length)
    mine = torch.frombuffer(bytearray(payload.ljust(length, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(group.size * length, dtype=torch.uint8, device=device)
    all_gather(everyone, mine, group).wait()
    with group.detector.watching():  # for NCCL, where this is the wait
        rows = everyone.view(group.size, length).cpu()
    if device.type != "cpu":
        group.detector.raise_agreed_error()  # which ends kernels, and these end as if complete
    return [row.numpy().tobytes() for row in rows]
