"""Tables that tell each program of a launch which elements are its own."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
EVEN = 8  # elements: 16 bytes of 16-bit floats, the widest access


class Blocks(NamedTuple):
    """Blocks of elements, sorted by owner.

    ``rows`` (blocks, 3) has the owner, start and stop of each, ``runs`` (owners, 3) each owner and
    the range of its blocks; both are int64 on the device. ``aligned``: all starts and stops are
    multiples of 8, so that a thread can read 16 bytes at once.
    """

    rows: Tensor
    runs: Tensor
    aligned: bool


def blocks_of(spans: Array, size: int, device: torch.device) -> Blocks:
    """Divide ``spans``, an int64 array of rows (owner, start, stop), into blocks of ``size``.

    A table is copied to the device once, and kept for the next launch with the same spans.

    >>> spans = np.array([(7, 10, 13), (5, 0, 10)])
    >>> blocks = blocks_of(spans, 8, torch.device("cpu"))
    >>> blocks.rows.tolist(), blocks.runs.tolist(), blocks.aligned
    ([[5, 0, 8], [5, 8, 10], [7, 10, 13]], [[5, 0, 2], [7, 2, 3]], False)
    """
    return _divide(np.ascontiguousarray(spans, np.int64).tobytes(), size, device)


@lru_cache(maxsize=64)
def _divide(spans: bytes, size: int, device: torch.device) -> Blocks:
    table = np.frombuffer(spans, np.int64).reshape(-1, 3)
    owner, start, stop = table[np.argsort(table[:, 0], kind="stable")].T
    counts = -(-(stop - start) // size)
    span = np.repeat(np.arange(len(counts)), counts)
    first = start[span] + size * (np.arange(len(span)) - (counts.cumsum() - counts)[span])
    rows = np.stack([owner[span], first, np.minimum(first + size, stop[span])], 1)
    owners, firsts, lengths = np.unique(rows[:, 0], return_index=True, return_counts=True)
    runs = np.stack([owners, firsts, firsts + lengths], 1)
    there = [torch.from_numpy(array).to(device) for array in (rows, runs)]
    return Blocks(there[0], there[1], aligned=not (table[:, 1:] % EVEN).any())
