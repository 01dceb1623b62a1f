"""One file per rank beside a checkpoint: what ranks do not have in common.

Frameworks save the optimizer of rank 0 alone, and under most methods the ranks differ.
"""

import os
import re
from contextlib import suppress
from typing import Any, Protocol

import fsspec
import torch

from offbeat.exchange import Saved
from offbeat.replica.replica import Replica


class Stateful(Protocol):
    """An object with the pair of methods that replicas, optimizers and scalers have."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


def save_per_rank(folder: str | os.PathLike[str], **parts: Stateful) -> None:
    """Write what this rank needs to resume to ``folder/offbeat-rank<r>.pt``; every rank calls.

    The file holds ``{name: part.state_dict()}``, for example of
    ``save_per_rank(folder, replica=replica, optimizer=optimizer, scaler=scaler)``. It is complete
    or absent. ``folder`` is created; it may be local to each node, or a URL of fsspec. Files that
    more ranks have left there are removed. No communication. Extra memory: a copy of the
    replica's state.

    Raises ``ValueError`` if no part is a :class:`Replica`, and as ``Replica.state_dict`` does.
    """
    world = next(iter(_replicas(parts).values())).world
    saved = {name: part.state_dict() for name, part in parts.items()}
    files, root = fsspec.core.url_to_fs(os.fspath(folder))
    files.makedirs(root, exist_ok=True)
    path = f"{root}/{_NAME.format(world.rank)}"
    with files.open(f"{path}.part", "wb") as file:
        torch.save(saved, file)
    files.mv(f"{path}.part", path)  # a rank that is killed while it writes leaves no torn file
    for rank, stale in _paths(files, root).items():
        if rank not in world.ranks:  # of an earlier save by more ranks
            with suppress(FileNotFoundError):  # all ranks remove it
                files.rm_file(stale)


def load_per_rank(folder: str | os.PathLike[str], **parts: Stateful) -> None:
    """Restore what :func:`save_per_rank` wrote, on all ranks; replicas last.

    Load the model before it: a replica restores the parameters of its rank. A folder that was
    saved right after ``finish()``, or under a method that keeps ranks equal, may be loaded by
    another number of ranks. New ranks then take the optimizer of the lowest rank in it.

    Raises ``ValueError``, the same on all ranks, if the file of a rank is missing, damaged or does
    not hold exactly these parts, and as ``Replica.load_state_dict`` does.
    """
    replicas = _replicas(parts)
    first, fault, saved = next(iter(replicas.values())), None, {}
    try:
        saved = _read(os.fspath(folder), first, parts)
        for name, part in parts.items():
            if name not in replicas:
                part.load_state_dict(saved[name])
    except Exception as error:  # whatever it is: the other ranks wait
        fault = f"cannot load the per-rank state in {folder}: {error}"
    first.raise_alike(fault)
    for name, replica in replicas.items():
        replica.load_state_dict(saved[name])


def _replicas(parts: dict[str, Stateful]) -> dict[str, Replica]:
    found = {name: part for name, part in parts.items() if isinstance(part, Replica)}
    if not found:
        raise ValueError(
            f"got the parts {list(parts)} without a replica; pass replica=replica, which knows the "
            "rank, beside what belongs to it"
        )
    return found


def _read(folder: str, replica: Replica, parts: dict[str, Stateful]) -> Saved:
    """Return the state of each part: of this rank, or of all ranks if their number has changed."""
    files, root = fsspec.core.url_to_fs(folder)
    paths = _paths(files, root)
    world = replica.world
    own = _load(files, paths[world.rank], parts) if world.rank in paths else None
    if own is not None and _size(own, parts) == world.size:
        return own
    found = [_load(files, paths[rank], parts) for rank in sorted(paths)]
    if not found or (own is None and _size(found[0], parts) == world.size):
        raise ValueError(
            f"rank {world.rank}'s file is missing, found those of the ranks {sorted(paths)}: every "
            "rank saves and loads its own; call save_per_rank() on every rank, not on rank 0 alone"
        )
    merged = dict(own or found[0])
    for name, part in parts.items():
        if isinstance(part, Replica):
            merged[name] = {key: entry for one in found for key, entry in one[name].items()}
    return merged


def _load(files: Any, path: str, parts: dict[str, Stateful]) -> Saved:
    with files.open(path, "rb") as file:
        saved: Saved = torch.load(file, map_location="cpu", weights_only=True)
    if saved.keys() != parts.keys():
        raise ValueError(
            f"{path.rpartition('/')[2]} holds {[*saved]}, got {[*parts]}; load the parts that were "
            "saved"
        )
    return saved


def _size(saved: Saved, parts: dict[str, Stateful]) -> int:
    """Return the number of ranks that saved this."""
    name = next(name for name, part in parts.items() if isinstance(part, Replica))
    size: int = next(iter(saved[name].values()))["size"]
    return size


def _paths(files: Any, root: str) -> dict[int, str]:
    """Return the file of each rank in a folder; none if the folder does not exist."""
    found = {}
    for path in files.find(root, maxdepth=1):  # glob() would read brackets in the folder's name
        name = re.fullmatch(_NAME.format(r"(\d+)"), path.rpartition("/")[2])
        if name is not None:
            found[int(name[1])] = path
    return found


_NAME = "offbeat-rank{}.pt"
