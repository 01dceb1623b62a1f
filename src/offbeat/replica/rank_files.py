"""The files of one save by all ranks: written beside the last ones, then put in their place."""

import os
import re
import shutil
from contextlib import suppress
from typing import Any, NamedTuple

import fsspec
import torch

from offbeat.exchange import Saved

HEAD = "offbeat"  # the part of a file that says to which save it belongs
_CURRENT, _NEXT = "offbeat-rank{}.pt", "offbeat-rank{}.next.pt"


class Found(NamedTuple):
    """A file in a folder, and the save to which it belongs."""

    rank: int
    is_next: bool
    save: str
    step: int
    size: int


class RankFiles:
    """The files ``offbeat-rank<r>.pt`` in a folder, local or a URL of fsspec.

    A save has two phases. Every rank writes ``offbeat-rank<r>.next.pt``; once all ranks have,
    each renames it to ``offbeat-rank<r>.pt``. If a rank is killed in the first phase, the last
    save is whole; if in the second, the new one is, under both names.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._files, self._root = fsspec.core.url_to_fs(self.folder)

    def write(self, rank: int, saved: Saved) -> None:
        """Write the next file of ``rank``; complete or absent."""
        self._files.makedirs(self._root, exist_ok=True)
        path = self._path(_NEXT, rank)
        with self._files.open(f"{path}.part", "wb") as file:
            torch.save(saved, file)
        self._files.mv(f"{path}.part", path)

    def switch(self, rank: int) -> None:
        """Put the next file of ``rank`` in the place of the current one."""
        self._files.mv(self._path(_NEXT, rank), self._path(_CURRENT, rank))

    def discard(self, rank: int) -> None:
        """Remove what :meth:`write` has left."""
        path = self._path(_NEXT, rank)
        for left in (f"{path}.part", path):
            with suppress(OSError):
                self._files.rm_file(left)

    def remove(self, rank: int) -> None:
        """Remove the current file of ``rank``, which other ranks may do at the same time."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(_CURRENT, rank))

    def ranks(self, *, is_next: bool = False) -> list[int]:
        """Return the ranks that have a file; none if the folder does not exist."""
        pattern = (_NEXT if is_next else _CURRENT).format(r"(\d+)")
        names = [path.rpartition("/")[2] for path in self._files.find(self._root, maxdepth=1)]
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(pattern, name)))

    def is_interrupted(self) -> bool:
        """Return whether a save has left files that are not in their place."""
        with suppress(Exception):  # who reads or writes the folder next will say what is wrong
            return bool(self.ranks(is_next=True))
        return False

    def read(self, rank: int, *, is_next: bool = False) -> Saved:
        """Return the content of a file."""
        path = self._path(_NEXT if is_next else _CURRENT, rank)
        with self._files.open(path, "rb") as file:
            saved: Saved = torch.load(file, map_location="cpu", weights_only=True)
        return saved

    def found(self, first: int, count: int, part: str) -> list[Found]:
        """Describe the files of the ranks ``first``, ``first + count`` and so on.

        ``part`` is the name of a replica in files of earlier versions, which have no head.
        """
        kept = []
        for is_next in (False, True):
            for rank in self.ranks(is_next=is_next):
                if rank % count == first:
                    saved = self.read(rank, is_next=is_next)
                    kept.append(Found(rank, is_next, *_head(saved, part)))
        return kept

    def free_bytes(self) -> int | None:
        """Return the free bytes of a local folder."""
        with suppress(OSError):
            return shutil.disk_usage(self.folder).free
        return None

    def _path(self, pattern: str, rank: int) -> str:
        return f"{self._root}/{pattern.format(rank)}"


def newest_whole(found: list[Found]) -> Found | None:
    """Return a file of the newest save of which all ranks have one, or None.

    >>> old = [Found(rank, False, "a", 16, 2) for rank in range(2)]
    >>> newest_whole([*old, Found(0, True, "b", 32, 2)]).save
    'a'
    >>> newest_whole([old[1], Found(0, False, "b", 32, 2), Found(1, True, "b", 32, 2)]).save
    'b'
    """
    saves: dict[str, list[Found]] = {}
    for file in found:
        saves.setdefault(file.save, []).append(file)
    whole = [
        files for files in saves.values() if {f.rank for f in files} >= {*range(files[0].size)}
    ]
    # Of two saves of one step the one that was to replace the other is newer.
    order = sorted(whole, key=lambda files: (files[0].step, any(f.is_next for f in files)))
    return order[-1][0] if order else None


def _head(saved: Saved, part: str) -> tuple[str, int, int]:
    head: dict[str, Any] | None = saved.get(HEAD)
    if head is None:
        entry = next(iter(saved[part].values()))
        return f"step {entry['step']}", entry["step"], entry["size"]
    return head["save"], head["step"], head["size"]
