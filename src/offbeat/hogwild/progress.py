"""The progress of all workers, as a live table in a terminal."""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from offbeat.hogwild.worker import LOSS, STEPS


class Progress:
    """A live table of steps, steps per second and loss per worker, on standard error.

    Nothing is displayed if standard error is not a terminal. ``board`` has one row per worker.
    """

    def __init__(self, board: Tensor, *, shown: bool) -> None:
        """Prepare the display of ``board``; ``shown=False`` disables it."""
        console = Console(stderr=True)
        self._board = board
        self._start = time.monotonic()
        self._live = Live(console=console, auto_refresh=False)
        self._shown = shown and console.is_terminal

    def __enter__(self) -> "Progress":
        """Start the display."""
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the display; its last state stays on the screen."""
        if self._shown:
            self._live.stop()

    def refresh(self) -> None:
        """Display the current contents of ``board``."""
        if self._shown:
            self._live.update(
                progress_table(self._board, time.monotonic() - self._start), refresh=True
            )


def progress_table(board: Tensor, seconds: float) -> Table:
    """Build a table with one row per worker; rates are means over ``seconds``.

    >>> import torch
    >>> progress_table(torch.tensor([[50.0, 0.25]]), seconds=2.0).columns[2]._cells
    ['25.0']
    """
    shown = Table("worker", "steps", "steps/s", "loss", box=None)
    for number, row in enumerate(board.tolist()):
        rate = f"{row[STEPS] / seconds:.1f}"
        shown.add_row(str(number), f"{row[STEPS]:.0f}", rate, f"{row[LOSS]:.4f}")
    return shown
