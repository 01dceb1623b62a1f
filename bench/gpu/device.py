"""Times of work on a GPU, by events of its stream, and what a bench does without a GPU."""

from collections.abc import Callable

import torch
import typer

from bench.harness import Bench, console

FLUSH = 2**28  # bytes, more than the cache of any GPU


def device_of(bench: Bench) -> torch.device:
    """The first GPU; without one, a message and exit code 2."""
    if not torch.cuda.is_available():
        console.print(f"{bench.name} needs a GPU: torch {torch.__version__} sees none")
        raise typer.Exit(2)
    return torch.device("cuda", torch.cuda.current_device())


def uncached(work: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Seconds of ``work`` in each round, with nothing in the cache; the first calls do not count.

    Clearing the cache keeps the GPU busy while the host prepares the launches that are timed.
    """
    flushed = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    for _ in range(3):
        work()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return found
