"""Start workers that share memory, watch them, and collect what they return."""

import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from signal import Signals
from typing import Any

import torch.multiprocessing as mp
from torch import nn
from torch.optim import Optimizer

from offbeat.hogwild import worker
from offbeat.hogwild.adam import AsyncAdam
from offbeat.hogwild.progress import progress as showing

LOOK_SECONDS = 0.1
ENDING = 10.0  # seconds in which a worker may end after its result


class WorkerFailed(RuntimeError):
    """Raised when a worker raises or is killed; the message names it, with any traceback."""


def launch(
    fn: Callable[..., Any],
    workers: int = 4,
    args: Sequence[Any] = (),
    *,
    replacements: int = 0,
    progress: bool = True,
    meanwhile: Callable[[], object] | None = None,
) -> list[Any]:
    """Run ``fn(worker, *args)`` in ``workers`` processes that share ``args``; return the results.

    Processes are spawned, each with one thread for matrix products. Modules in ``args`` must be
    in shared memory and optimizers be :class:`AsyncAdam`, so that all workers update the same
    memory. Results are returned by worker number, pickled.

    If a worker raises or is killed, the others are terminated; on Ctrl-C all are, and also when the
    parent process ends for any reason. A killed worker loses at most the update in progress, since
    all state is shared: with ``replacements`` > 0 up to that many killed workers are replaced by a
    process that calls ``fn`` with the same number. A worker that raised is not replaced.

    Args:
        fn: a function at the top level of a module, which workers can import.
        workers: the number of processes.
        args: arguments of ``fn`` after the worker's number.
        replacements: the number of killed workers to replace in total.
        progress: on a terminal, show steps, steps per second and the loss last given to
            :func:`report_loss` for every worker.
        meanwhile: called in the parent about every 0.1 s while workers run. If it raises, the
            workers are terminated.

    Raises:
        ValueError: if arguments are not shared or cannot be pickled.
        WorkerFailed: with the number and traceback of each worker that failed.

    Source: Niu et al. 2011, Hogwild!, section 2, with processes for threads.
    """
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers={workers!r}, expected how many processes to start, 1 or more")
    _check_shared(args)
    crew = _Crew(fn, tuple(args), workers, replacements)
    try:
        with showing(crew.board, shown=progress) as refresh:
            while crew.running:
                crew.look(LOOK_SECONDS)
                refresh()
                if meanwhile is not None:
                    meanwhile()
        return [crew.results[number] for number in range(workers)]
    finally:
        crew.end()


class _Crew:
    """The running workers, their results, and the number of replacements left."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], workers: int, replacements: int
    ) -> None:
        self.board = worker.new_board(workers)
        self.results: dict[int, Any] = {}
        self.running: dict[int, tuple[BaseProcess, connection.Connection]] = {}
        self.ending: list[tuple[BaseProcess, float]] = []  # with results, and until when they may
        self._fn, self._args, self._replacements = fn, args, replacements
        try:
            for number in range(workers):
                self._start(number)
        except BaseException:
            self.end()
            raise

    def look(self, seconds: float) -> None:
        """Wait up to ``seconds`` for results; replace killed workers, raise failures."""
        ready = connection.wait([channel for _, channel in self.running.values()], seconds)
        # Of a worker that was killed, the workers of its DataLoader keep the channel open.
        ended = [
            number
            for number, (process, channel) in self.running.items()
            if channel in ready or process.exitcode is not None
        ]
        failures = [f for number in ended if (f := self._receive(number)) is not None]
        if failures:
            raise WorkerFailed("\n".join(failures))

    def end(self) -> None:
        """Terminate all running workers; let those whose results have come end by themselves."""
        for process, _ in self.running.values():
            process.terminate()
        deadline = time.monotonic() + 3.0
        for process, channel in self.running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            channel.close()
        self.running = {}
        for process, until in self.ending:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()

    def _start(self, number: int) -> None:
        context = mp.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=worker.main,
            args=(number, self.board, sender, self._fn, self._args),
            name=f"hogwild-{number}",
            daemon=True,
        )
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{self._fn!r} or its arguments cannot be handed to another process ({error}); "
                "give launch a function defined at the top level of a module, and plain arguments"
            ) from error
        finally:
            sender.close()  # now the pipe ends when the worker does
        self.running[number] = (process, receiver)

    def _receive(self, number: int) -> str | None:
        """Store a worker's result, or return how it failed; a killed worker may be replaced."""
        process, channel = self.running.pop(number)
        try:
            if process.exitcode is not None and not channel.poll():
                raise EOFError
            returned, value = pickle.loads(channel.recv_bytes())
        except (EOFError, OSError):  # OSError: killed while it sent its result
            process.join()
            if self._replacements > 0:
                self._replacements -= 1
                self._start(number)
                return None
            return f"worker {number} {_death(process.exitcode)}"
        finally:
            channel.close()
        self.ending.append((process, time.monotonic() + ENDING))
        if not returned:
            return f"worker {number} raised\n{value}"
        self.results[number] = value
        return None


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        named = {number.value: number.name for number in Signals}
        return f"was ended by {named.get(-exitcode, f'signal {-exitcode}')}"
    return f"ended with exit code {exitcode} and without a result"


def _check_shared(args: Sequence[Any]) -> None:
    """Raise ValueError for arguments that each worker would silently copy."""
    for place, value in enumerate(args):
        if isinstance(value, Optimizer) and not isinstance(value, AsyncAdam):
            raise ValueError(
                f"args[{place}] is a {type(value).__name__}, whose state each worker would keep "
                "to itself; use offbeat.hogwild.AsyncAdam, built before launch"
            )
        if isinstance(value, nn.Module):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                if tensor.device.type != "cpu" or not tensor.is_shared():
                    raise ValueError(
                        f"{name!r} of args[{place}] is on {tensor.device}, not in shared memory; "
                        "call model.cpu() and model.share_memory() before AsyncAdam is built"
                    )
