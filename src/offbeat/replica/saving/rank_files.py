"""The files in a folder in which every rank saves: new ones for each save."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from offbeat.exchange import Saved
from offbeat.platform.privates import allow_parts_in_files

# Earlier versions wrote one save per folder, offbeat-rank<r>.pt: here number 0 of 0 ranks.
_NAME = re.compile(r"offbeat-(?:save(\d+)-)?rank(\d+)(?:-of-(\d+))?\.pt(\.part)?")


class Save(NamedTuple):
    """A save in a folder: later ones have higher numbers."""

    number: int
    size: int  # the number of ranks


class _File(NamedTuple):
    path: str
    save: Save
    rank: int
    is_part: bool


class RankFiles:
    """The files ``offbeat-save<n>-rank<r>-of-<size>.pt`` in a folder, local or a URL of fsspec.

    A file is written once. Those of earlier saves are removed when all ranks have written theirs,
    so that a folder holds a save of all ranks at any moment. Reading changes nothing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Name the folder; it need not exist."""
        # Both take a tenth of the time in which offbeat is imported.
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.folder = os.fspath(folder)
        self._files, self._root = fsspec.core.url_to_fs(self.folder)
        self._is_local = isinstance(self._files, LocalFileSystem)

    def saves(self) -> dict[Save, set[int]]:
        """Return the ranks that have a file, for each save."""
        found: dict[Save, set[int]] = {}
        for file in self._list():
            if not file.is_part:
                found.setdefault(file.save, set()).add(file.rank)
        return found

    def whole(self, rank: int, size: int) -> dict[Save, bool]:
        """Return each save, and whether ``rank`` of ``size`` ranks finds all that it would read."""
        # Ranks that start again may have other numbers than those that have saved.
        return {
            save: len(ranks) >= save.size or (save.size == size and rank in ranks)
            for save, ranks in self.saves().items()
        }

    def write(self, save: Save, rank: int, content: Saved) -> None:
        """Write the file of ``rank``, complete or not at all: no crash of the machine tears it."""
        self._files.makedirs(self._root, exist_ok=True)
        path = f"{self._root}/offbeat-save{save.number}-rank{rank}-of-{save.size}.pt"
        try:
            with self._files.open(f"{path}.part", "wb") as file:
                torch.save(_plain(content), file)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            raise OSError(f"{_cause(error)}{self._room()}") from error
        self._files.mv(f"{path}.part", path)
        if self._is_local:
            _sync_folder(self._root)
            _sync_folder(os.path.dirname(self._root))

    def read(self, save: Save, rank: int) -> Saved:
        """Return the content of a file."""
        path = next(f.path for f in self._list() if f[1:] == (save, rank, False))
        allow_parts_in_files()
        with self._files.open(path, "rb") as file:
            saved: Saved = torch.load(file, map_location="cpu", weights_only=True)
        return saved

    def discard(self, save: Save, rank: int) -> None:
        """Remove what :meth:`write` has left."""
        self._remove(lambda file: file.save == save and file.rank == rank)

    def remove_before(self, save: Save, rank: int, ranks: Sequence[int]) -> None:
        """Remove earlier files of ``rank``, and of all that are not among ``ranks``."""
        self._remove(
            lambda file: (
                (file.is_part or file.save.number < save.number)
                and (file.rank == rank or file.rank not in ranks)
            )
        )

    def _room(self) -> str:
        with suppress(OSError):  # of a local folder
            return f"; {shutil.disk_usage(self._root).free / 1e6:,.1f} MB are free there"
        return ""

    def _list(self) -> list[_File]:
        self._files.invalidate_cache()  # other ranks write and remove files
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [file for path in paths if (file := _parsed(path))]

    def _remove(self, is_stale: Callable[[_File], bool]) -> None:
        with suppress(OSError):  # the next save tries again
            for file in filter(is_stale, self._list()):
                with suppress(FileNotFoundError):  # another rank was faster
                    self._files.rm_file(file.path)


def _parsed(path: Any) -> _File | None:
    found = _NAME.fullmatch(path.rpartition("/")[2])
    if found is None:
        return None
    number, rank, size, part = found.groups()
    return _File(path, Save(int(number or 0), int(size or 0)), int(rank), part is not None)


def _plain(value: Any) -> Any:
    """Make numbers of numpy those of Python: files with others are refused when they are read."""
    if type(value) is dict:
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _cause(error: BaseException) -> BaseException:
    """Return the error of the file, in place of which torch raises one of its own."""
    inner = error.__context__
    return error if inner is None or isinstance(error, OSError) else _cause(inner)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
