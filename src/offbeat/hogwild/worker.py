"""Inside a worker process: its number, its progress, and its end."""

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection, current_process, parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

STEPS, LOSS = 0, 1  # columns of the board


class _Seat:
    """The number and the board of this process, set once when a worker starts."""

    number: int | None = None
    board: Any = None  # a numpy view, since writing through a tensor takes microseconds


def new_board(workers: int) -> Tensor:
    """Allocate steps and last loss of every worker in shared memory, one cache line each."""
    board = torch.zeros(workers, 8, dtype=torch.float64)
    board[:, LOSS] = torch.nan
    return board.share_memory_()  # type: ignore[no-any-return]


def number() -> int | None:
    """Return this worker's number, or None outside of :func:`offbeat.hogwild.launch`."""
    return _Seat.number


def stepped() -> None:
    """Count an optimizer step for the progress display."""
    if _Seat.board is not None:
        _Seat.board[_Seat.number, STEPS] += 1


def report_loss(loss: float | Tensor) -> None:
    """Show ``loss`` in the progress of :func:`offbeat.hogwild.launch`; does nothing outside.

    >>> report_loss(0.5)
    """
    if _Seat.board is not None:
        _Seat.board[_Seat.number, LOSS] = float(loss)


def main(
    number: int,
    board: Tensor,
    channel: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run ``fn(number, *args)`` and send (True, result) or (False, traceback) to the parent."""
    # Ctrl-C reaches every process of the terminal; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()
    current_process().daemon = False  # or it could not start the workers of a DataLoader
    torch.set_num_threads(1)  # the workers are the parallelism
    _Seat.number, _Seat.board = number, board.numpy()
    try:
        # Plain pickle copies tensors. Handles to shared memory would end with this process.
        answer = pickle.dumps((True, fn(number, *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    channel.send_bytes(answer)
    channel.close()


def _follow_parent() -> None:
    """Exit with the parent: otherwise a worker whose parent was killed would never end."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
