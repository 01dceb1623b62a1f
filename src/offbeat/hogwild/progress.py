"""The progress of all workers, as a live table in a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor

from offbeat.hogwild.worker import LOSS, STEPS


@contextmanager
def progress(board: Tensor, *, shown: bool) -> Iterator[Callable[[], object]]:
    """Show steps, steps per second and loss of each worker, a row of ``board``, on standard error.

    The block gets a function that shows the current contents; it does nothing if standard error is
    not a terminal. The last state stays on the screen.
    """
    console, start = Console(stderr=True), time.monotonic()
    if not shown or not console.is_terminal:
        yield lambda: None
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda: live.update(progress_table(board, time.monotonic() - start), refresh=True)


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
