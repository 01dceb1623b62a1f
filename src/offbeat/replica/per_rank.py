"""One file per rank beside a checkpoint: what ranks do not have in common.

Frameworks save the optimizer of rank 0 alone, and under most methods the ranks differ.
"""

import copy
import json
import os
import uuid
import warnings
from typing import Any, Protocol

import torch

from offbeat.comm.failure import PeerLost
from offbeat.exchange import Saved
from offbeat.replica.rank_files import HEAD, Found, RankFiles, newest_whole
from offbeat.replica.replica import Replica


class Stateful(Protocol):
    """An object with the pair of methods that replicas, optimizers and scalers have."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


def save_per_rank(folder: str | os.PathLike[str], **parts: Stateful) -> None:
    """Write what this rank needs to resume to ``folder/offbeat-rank<r>.pt``; all ranks call.

    The file holds ``{name: part.state_dict()}``, for example of
    ``save_per_rank(folder, replica=replica, optimizer=optimizer, scaler=scaler)``, and the save to
    which it belongs. ``folder`` is created; it may be local to each node, or a URL of fsspec. The
    last save in it stays whole until all ranks have written this one, whatever happens meanwhile:
    a rank that is killed, a disk that is full. Files that more ranks have left there are removed.
    Two small gathers; extra memory: a copy of the replica's state; disk: two saves.

    Raises ``ValueError``, the same on all ranks, if no part is a :class:`Replica`, as
    ``Replica.state_dict`` does, and if the file of a rank cannot be written.
    """
    name, replica = next(iter(_replicas(parts).items()))
    files, rank, saved, fault = RankFiles(folder), replica.world.rank, {}, None
    try:
        saved = {name: part.state_dict() for name, part in parts.items()}
    except PeerLost:
        raise
    except Exception as error:  # whatever it is: the other ranks wait
        fault = str(error)
    replica.raise_alike(fault)
    words = _gather(replica, [files.is_interrupted(), uuid.uuid4().hex])
    if any(is_interrupted for is_interrupted, _ in words):
        _complete(files, replica, name)
    head = {"save": words[0][1], "step": replica.steps, "size": replica.world.size}
    try:
        files.write(rank, {HEAD: head, **saved})
    except Exception as error:
        fault = _write_fault(files, error)
    try:
        replica.raise_alike(fault)
    except ValueError:
        files.discard(rank)
        raise
    files.switch(rank)
    for other in files.ranks():
        if other not in replica.world.ranks:  # of an earlier save by more ranks
            files.remove(other)


def load_per_rank(folder: str | os.PathLike[str], **parts: Stateful) -> None:
    """Restore what :func:`save_per_rank` wrote, on all ranks; replicas last.

    Load the model before it: a replica restores the parameters of its rank. If the last save was
    interrupted, this is the newest one that all ranks have, and rank 0 warns. A folder that was
    saved right after ``finish()``, or under a method that keeps ranks equal, may be loaded by
    another number of ranks. New ranks then take the optimizer of the lowest rank in it.

    Raises ``ValueError``, the same on all ranks, if the file of a rank is missing, damaged or does
    not hold exactly these parts, and as ``Replica.load_state_dict`` does. All parts then are as
    before.
    """
    replicas = _replicas(parts)
    (name, first), others = next(iter(replicas.items())), parts.keys() - replicas.keys()
    files, saved, before = RankFiles(folder), {}, {}
    if any(_gather(first, files.is_interrupted())):
        _complete(files, first, name)
    fault = None
    try:
        saved = _read(files, first, parts)
        for other in [other for other in parts if other in others]:
            before[other] = _kept(parts[other])
            parts[other].load_state_dict(saved[other])
    except Exception as error:  # whatever it is: the other ranks wait
        fault = f"cannot load the per-rank state in {folder}: {error}"
    try:
        first.raise_alike(fault)
        for name, replica in replicas.items():
            replica.load_state_dict(saved[name])
    except ValueError:
        for other, earlier in before.items():
            parts[other].load_state_dict(earlier)
        raise


def _complete(files: RankFiles, replica: Replica, part: str) -> None:
    """Bring a folder whose last save was interrupted back to one whole save; all ranks call."""
    rank, count, fault = replica.world.ranks.index(replica.world.rank), replica.world.size, None
    mine: list[Found] = []
    try:
        mine = files.found(rank, count, part)
    except Exception as error:
        fault = f"cannot read the files in {files.folder}: {error}"
    replica.raise_alike(fault)
    whole = newest_whole([Found(*found) for others in _gather(replica, mine) for found in others])
    if whole is None:
        return  # the files of a rank are missing, as reading them will say
    if rank == 0:
        warnings.warn(
            f"a save in {files.folder} was interrupted; the newest that all ranks have is of step "
            f"{whole.step}",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        for found in mine:
            if found.is_next and found.save == whole.save:
                files.switch(found.rank)
            elif found.is_next:
                files.discard(found.rank)
    except OSError as error:
        fault = f"cannot complete an interrupted save in {files.folder}, make it writable: {error}"
    replica.raise_alike(fault)  # others may read these files


def _gather(replica: Replica, word: Any) -> list[Any]:
    return [json.loads(text) for text in replica.gather(json.dumps(word))]


def _write_fault(files: RankFiles, error: Exception) -> str:
    free = files.free_bytes()
    room = "" if free is None else f"; {free / 1e6:,.1f} MB are free there"
    return (
        f"cannot write its state to {files.folder}: {error}{room}. The last save in the folder is "
        "whole; make room, or save elsewhere"
    )


def _kept(part: Stateful) -> Saved:
    """Return what brings a part back; an optimizer replaces its tensors and keeps these."""
    state = part.state_dict()
    return state if isinstance(part, torch.optim.Optimizer) else copy.deepcopy(state)


def _replicas(parts: dict[str, Stateful]) -> dict[str, Replica]:
    found = {name: part for name, part in parts.items() if isinstance(part, Replica)}
    if not found:
        raise ValueError(
            f"got the parts {list(parts)} without a replica; pass replica=replica, which knows the "
            "rank, beside what belongs to it"
        )
    return found


def _read(files: RankFiles, replica: Replica, parts: dict[str, Stateful]) -> Saved:
    """Return the state of each part: of this rank, or of all ranks if their number has changed."""
    world, ranks = replica.world, files.ranks()
    own = _load(files, world.rank, parts) if world.rank in ranks else None
    if own is not None and _size(own, parts) == world.size:
        return own
    found = [_load(files, rank, parts) for rank in ranks]
    if not found or (own is None and _size(found[0], parts) == world.size):
        raise ValueError(
            f"rank {world.rank}'s file is missing, found those of the ranks {ranks}: every rank "
            "saves and loads its own; call save_per_rank() on every rank, not on rank 0 alone"
        )
    merged = dict(own or found[0])
    for name, part in parts.items():
        if isinstance(part, Replica):
            merged[name] = {key: entry for one in found for key, entry in one[name].items()}
    return merged


def _load(files: RankFiles, rank: int, parts: dict[str, Stateful]) -> Saved:
    saved = files.read(rank)
    saved.pop(HEAD, None)
    if saved.keys() != parts.keys():
        raise ValueError(
            f"the file of rank {rank} holds {[*saved]}, got {[*parts]}; load the parts that were "
            "saved"
        )
    return saved


def _size(saved: Saved, parts: dict[str, Stateful]) -> int:
    """Return the number of ranks that saved this."""
    name = next(name for name, part in parts.items() if isinstance(part, Replica))
    size: int = next(iter(saved[name].values()))["size"]
    return size
