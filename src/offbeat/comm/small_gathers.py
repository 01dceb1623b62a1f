"""Small values that the members of a group gather, to compare or to combine."""

import struct
from collections.abc import Sequence

import torch

from offbeat.comm.collectives import all_gather
from offbeat.comm.group import Group, message_device


def gather_bytes(payload: bytes, group: Group) -> list[bytes]:
    """Gather every member's ``payload``, of any lengths; two small all-gathers."""
    device = message_device(group)
    sizes = torch.zeros(group.size, dtype=torch.int64, device=device)
    all_gather(sizes, torch.tensor([len(payload)], device=device), group).wait()
    longest = max(1, int(sizes.max()))
    padded = bytearray(payload.ljust(longest, b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    everyone = torch.zeros(group.size * longest, dtype=torch.uint8, device=device)
    all_gather(everyone, mine, group).wait()
    rows = everyone.view(group.size, longest).cpu()
    return [bytes(row[:n].tolist()) for row, n in zip(rows, sizes.tolist(), strict=True)]


def gather_numbers(numbers: Sequence[float], group: Group) -> list[tuple[float, ...]]:
    """Gather every member's ``numbers`` as float64, equally many each; one small all-gather."""
    packed = struct.pack(f"{len(numbers)}d", *numbers)
    device = message_device(group)
    mine = torch.frombuffer(bytearray(packed), dtype=torch.float64).to(device)
    out = torch.empty(group.size * len(numbers), dtype=torch.float64, device=device)
    all_gather(out, mine, group).wait()
    return [tuple(row) for row in out.view(group.size, -1).tolist()]


def raise_alike(fault: str | None, group: Group | None) -> None:
    """Raise ``ValueError`` on all ranks if any has a ``fault``, with the first such rank's text.

    All members call, those without a fault with None. ``group`` is None in a world of one.
    """
    faults = (
        [(fault or "").encode()] if group is None else gather_bytes((fault or "").encode(), group)
    )
    ranks = (None,) if group is None else group.ranks
    for rank, text in zip(ranks, faults, strict=True):
        if text:
            where = "" if rank is None else f"rank {rank}: "
            raise ValueError(where + text.decode())
