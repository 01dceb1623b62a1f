"""How far every worker is, live on a terminal."""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from offbeat.hogwild.worker import LOSS, STEPS


class Progress:
    """A table of steps, steps per second and loss by worker; nothing where nobody looks."""

    def __init__(self, board: Tensor, *, shown: bool) -> None:
        """Show ``board`` if the output is a terminal."""
        console = Console(stderr=True)
        self._board = board
        self._start = time.monotonic()
        self._live = Live(console=console, auto_refresh=False)
        self._shown = shown and console.is_terminal

    def __enter__(self) -> "Progress":
        """Begin to draw."""
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state on the screen."""
        if self._shown:
            self._live.stop()

    def refresh(self) -> None:
        """Draw the present state."""
        if self._shown:
            self._live.update(table(self._board, time.monotonic() - self._start), refresh=True)


def table(board: Tensor, seconds: float) -> Table:
    """One line a worker, rates since the start.

    >>> import torch
    >>> table(torch.tensor([[50.0, 0.25]]), seconds=2.0).columns[2]._cells
    ['25.0']
    """
    shown = Table("worker", "steps", "steps/s", "loss", box=None)
    for number, row in enumerate(board.tolist()):
        rate = f"{row[STEPS] / seconds:.1f}"
        shown.add_row(str(number), f"{row[STEPS]:.0f}", rate, f"{row[LOSS]:.4f}")
    return shown
