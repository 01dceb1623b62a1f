"""Process groups of NCCL whose failures heartbeats find."""

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import Store

# Torch's watchdog ends the process some time after a peer has ended, and tells those of its other
# groups to. Survivors of a loss go on, and others raise the error that names the lost rank.
_WATCHDOG = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_ENABLE_MONITORING",
)
_aborted: dict[Any, threading.Thread] = {}  # kept: the end of a group would free its memory again
_ending = threading.Lock()


def open_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return NCCL's part of a process group, which leaves failures of peers to heartbeats."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _environment(dict.fromkeys(_WATCHDOG, "0")):  # read once, by each new group
        return ProcessGroupNCCL(store, rank, size, options)


def abort(backend: Any) -> None:
    """End the kernels of ``backend``, in a thread that also frees its memory on the GPU."""
    # To free it waits for all kernels of the GPU. So the next group's must be ended meanwhile:
    # groups that are aborted one after the other wait for ever.
    with _ending:
        if backend not in _aborted:
            _aborted[backend] = threading.Thread(target=_abort, args=(backend,), daemon=True)
            _aborted[backend].start()


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


@atexit.register
def _await_aborts() -> None:
    # A thread that returns from a call of C++ after Python has ended aborts the process.
    for thread in list(_aborted.values()):
        thread.join(5.0)


def shut_down(backend: Any) -> None:
    """Wait for the kernels of ``backend`` and free its memory, unless an abort does."""
    # Both free the same memory, and neither looks whether the other has.
    with _ending:
        if backend in _aborted:
            return
    with contextlib.suppress(RuntimeError):
        backend.shutdown()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
