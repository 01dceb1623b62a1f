"""One file per rank beside a checkpoint: what ranks do not have in common.

Frameworks save the optimizer of rank 0 alone, and under most methods the ranks differ.
"""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.optim import Optimizer

from offbeat.exchange import Saved
from offbeat.kit.warning import warn
from offbeat.liveness.failure import PeerLost
from offbeat.replica.replica import Replica
from offbeat.replica.saving.entries import own_key, ranks_of
from offbeat.replica.saving.rank_files import RankFiles, Save

NODE = 128  # ranks that a node may have, and so files of a save in a folder of its own


class Stateful(Protocol):
    """An object with the pair of methods that replicas, optimizers and scalers have."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore the state."""


def save_per_rank(folder: str | os.PathLike[str], **parts: Stateful) -> None:
    """Write what this rank needs to resume to a file of its own in a folder; all ranks call.

    The file holds ``{name: part.state_dict()}``, for example of
    ``save_per_rank(folder, replica=replica, optimizer=optimizer, scaler=scaler)``. ``folder`` is
    created; it may be local to each node, or a URL of fsspec. The save before is removed once all
    ranks have written this one, so that a rank that is killed, or a disk that is full, leaves one
    save of all ranks. Small gathers; extra memory: a copy of the replica's state; disk: two saves.

    Raises ``ValueError``, the same on all ranks, if no part is a :class:`Replica`, as
    ``Replica.state_dict`` does, and if the file of a rank cannot be written.
    """
    with saving(folder, **parts):
        pass


@contextmanager
def saving(folder: str | os.PathLike[str], **parts: Stateful) -> Iterator[int]:
    """Save as :func:`save_per_rank`, and remove the save before at the end of the block.

    The block gets the number of this save, to write it into a file that :func:`load_save` follows.
    Once that file names this save, no one needs the one before.
    """
    replica, files = next(iter(_replicas(parts).values())), RankFiles(folder)
    save = _write(files, replica, parts)
    with alike(replica, "cannot write what belongs to its state"):
        yield save.number
    files.remove_before(save, replica.world.rank, replica.world.ranks)


def load_per_rank(
    folder: str | os.PathLike[str], *, missing_ok: bool = False, **parts: Stateful
) -> bool:
    """Restore what :func:`save_per_rank` wrote, on all ranks; return whether there was a save.

    Load the model before it: a replica restores the parameters of its rank. If the last save was
    interrupted, this is the newest one that all ranks have, and rank 0 warns with its step. A
    folder that was saved right after ``finish()``, or under a method that keeps ranks equal, may be
    loaded by another number of ranks. New ranks then take the optimizer of the lowest rank in it.
    A rank that has just joined a run has its state: it warns, loads nothing and returns True.

    Raises ``ValueError``, the same on all ranks, if the file of a rank is missing, damaged or does
    not hold exactly these parts, and as ``Replica.load_state_dict`` does. All parts then are as
    before. With ``missing_ok`` it returns False if no save of all ranks is found: at the first
    start, or after a kill in the first save.
    """
    return load_save(folder, parts, missing_ok=missing_ok)


def load_save(
    folder: str | os.PathLike[str],
    parts: dict[str, Stateful],
    number: int | None = None,
    *,
    missing_ok: bool = False,
) -> bool:
    """Load as :func:`load_per_rank`; the save of this number, by default the newest."""
    replicas, files = _replicas(parts), RankFiles(folder)
    first = next(iter(replicas.values()))
    if loads_nothing(first):
        return True
    chosen, newest = _choose(files, first, number)
    if chosen is None and missing_ok:
        return False
    with alike(first, f"cannot load the per-rank state in {files.folder}"):
        saved = _read(files, chosen or newest, first, parts)
    for name, replica in replicas.items():
        replica.check_state_dict(saved[name])
    others = {name: part for name, part in parts.items() if name not in replicas}
    _load_others(first, others, saved)
    for name, replica in replicas.items():
        replica.load_state_dict(saved[name])
    if chosen != newest and first.world.rank == first.world.ranks[0]:
        warn(
            f"the last save in {files.folder} was interrupted; loaded the newest that all ranks "
            f"have, of step {first.steps}"
        )
    return True


def loads_nothing(replica: Replica) -> bool:
    """Return whether this rank is new in a run, whose others train meanwhile; warn if it is."""
    if replica.is_new:
        warn(
            f"rank {replica.world.rank} has joined a run and has its state: it loads nothing; "
            "register() what else it needs, such as a schedule"
        )
    return replica.is_new


@contextmanager
def alike(replica: Replica, what: str) -> Iterator[list[str]]:
    """Raise what the block raises on one rank as the same ``ValueError`` on all; all enter.

    Fills the list with an entry for each rank that has entered, the same on all.
    """
    fault, faults = None, list[str]()
    try:
        yield faults
    except PeerLost:
        raise
    except Exception as error:  # whatever it is: the other ranks wait
        fault = f"{what}: {error}"
    where = f"rank {replica.world.rank}: " if replica.world.size > 1 else ""
    faults[:] = replica.gather(where + fault if fault else "")
    if first := next(filter(None, faults), None):
        raise ValueError(first)


def _write(files: RankFiles, replica: Replica, parts: dict[str, Stateful]) -> Save:
    """Write a save of all ranks beside those that there are, or leave nothing of it."""
    with alike(replica, "cannot save"):
        saved = {name: part.state_dict() for name, part in parts.items()}
        last = max((save.number for save in files.saves()), default=0)
    numbers, sizes = zip(*_gather(replica, [last, _size(saved, parts)]), strict=True)
    if {*sizes} != {len(numbers)}:  # a rank was lost after its state was taken
        return _write(files, replica, parts)
    save = Save(1 + max(numbers), len(numbers))
    try:
        with alike(replica, f"cannot write its state to {files.folder}") as everyone:
            files.write(save, replica.world.rank, saved)
    except ValueError:
        files.discard(save, replica.world.rank)
        raise
    # The run has survived a loss meanwhile. Not by its size: one rank may know of a loss at the end
    # of the call, of which others hear in the next.
    if len(everyone) != save.size:
        return _write(files, replica, parts)
    return save


def _size(saved: Saved, parts: dict[str, Stateful]) -> int:
    """Return how many ranks took part when a replica's state was taken."""
    name = next(iter(_replicas(parts)))
    return len(ranks_of(next(iter(saved[name].values()))))


def _choose(files: RankFiles, replica: Replica, number: int | None) -> tuple[Save | None, Save]:
    """Return the newest save that all ranks have, and the newest that any rank has a file of."""
    world = replica.world
    with alike(replica, f"cannot read the folder {files.folder}"):
        found = files.whole(world.rank, world.size)
        # What a node sees of a save whose other files lie elsewhere.
        some = {s: [*r] for s, r in files.saves().items() if len(r) < min(s.size, NODE)}
        mine = [(*save, is_whole, some.get(save, [])) for save, is_whole in found.items()]
    told = [
        {Save(n, size): word for n, size, *word in seen if number in (None, n)}
        for seen in _gather(replica, mine)
    ]
    newest = max((save for seen in told for save in seen), default=Save(0, 0))
    common = set.intersection(*map(set, told))
    whole = [save for save in common if all(seen[save][0] for seen in told)]
    # Some files may lie on nodes that take no part any more, or on those of ranks that had others'
    # numbers: then the ranks that miss theirs say so.
    spread = set[Save]()
    for save in common:
        ranks = {rank for seen in told for rank in seen[save][1]}
        if ranks and len(ranks) >= save.size <= max(ranks):
            spread.add(save)
    unseen = [save for save in common if save.size != world.size or save in spread]
    return max(whole, default=min(unseen, default=None)), newest


def _read(files: RankFiles, save: Save, replica: Replica, parts: dict[str, Stateful]) -> Saved:
    """Return the state of each part: of this rank, or of all ranks if their number has changed."""
    world, ranks = replica.world, sorted(files.saves().get(save, ()))
    name = next(iter(_replicas(parts)))

    def goes_on(saved: Saved) -> int | None:
        """The rank whose file this one goes on with, by what a file says of all; None for none."""
        key = own_key(world, saved[name])
        is_alike = key and _size(saved, parts) == world.size
        return int(key.removeprefix("rank")) if key and is_alike else None

    own = _load(files, save, world.rank, parts) if world.rank in ranks else None
    if own is not None and goes_on(own) == world.rank:
        return own
    found = {rank: _load(files, save, rank, parts) for rank in ranks}
    wanted = goes_on(next(iter(found.values()))) if found else world.rank
    if wanted in found:
        return found[wanted]
    if wanted is not None:
        raise ValueError(
            f"rank {wanted}'s file is missing, found those of the ranks {ranks}: every rank saves "
            "and loads its own; call save_per_rank() on every rank, not on rank 0 alone, and start "
            "ranks with other numbers than before where they see all files"
        )
    merged = dict(own or found[ranks[0]])
    for name in _replicas(parts):
        merged[name] = {key: entry for one in found.values() for key, entry in one[name].items()}
    return merged


def _load(files: RankFiles, save: Save, rank: int, parts: dict[str, Stateful]) -> Saved:
    saved = files.read(save, rank)
    if saved.keys() != parts.keys():
        raise ValueError(
            f"the file of rank {rank} holds {[*saved]}, got {[*parts]}; load the parts that were "
            "saved"
        )
    return saved


def _load_others(replica: Replica, others: dict[str, Stateful], saved: Saved) -> None:
    """Load what is no replica, on all ranks or on none."""
    before = {}
    try:
        with alike(replica, "cannot load the per-rank state"):
            for name, part in others.items():
                # An optimizer replaces its tensors and keeps these; others may write into them.
                state = part.state_dict()
                before[name] = state if isinstance(part, Optimizer) else copy.deepcopy(state)
                part.load_state_dict(saved[name])
    except ValueError:
        for name, earlier in before.items():
            others[name].load_state_dict(earlier)
        raise


def _replicas(parts: dict[str, Stateful]) -> dict[str, Replica]:
    found = {name: part for name, part in parts.items() if isinstance(part, Replica)}
    if not found:
        raise ValueError(
            f"got the parts {list(parts)} without a replica; pass replica=replica, which knows the "
            "rank, beside what belongs to it"
        )
    return found


def _gather(replica: Replica, word: Any) -> list[Any]:
    return [json.loads(text) for text in replica.gather(json.dumps(word))]
