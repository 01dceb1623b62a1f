"""A daemon thread that runs jobs one after the other."""

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVarTuple

from offbeat.liveness.error_context import forget_locals
from offbeat.platform.left_threads import leave

Arguments = TypeVarTuple("Arguments")
Job = tuple["Future[None]", Callable[..., None], tuple[Any, ...]]


class Lane:
    """Thread that runs the longer exchanges of a group in the order submitted.

    Like an executor with one worker, except that its thread is a daemon: an executor's is joined
    when the interpreter exits, and a rank that fails while its lane waits for a message would
    never exit, and its heartbeat would continue. ``wake`` ends such a wait; a job that waits for
    something else polls ``closing``.
    """

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self.closing = threading.Event()
        self._process = os.getpid()
        self._wake = wake
        self._last: Future[None] | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # A daemon thread that wakes up while the interpreter finalizes aborts the process.
        atexit.register(self.close)

    def submit(self, job: Callable[[*Arguments], None], *args: *Arguments) -> "Future[None]":
        """Run ``job`` after all jobs submitted before; return a future of its end or its error."""
        future: Future[None] = Future()
        self._last = future
        self._jobs.put((future, job, args))  # no closure: an error would keep it alive
        return future

    def close(self, patience: float = 5.0) -> None:
        """End the thread; jobs that still run or wait end with an error.

        It is awaited for at most ``patience`` seconds.
        """
        if os.getpid() != self._process:
            return  # a forked child: thread and messages are its parent's
        atexit.unregister(self.close)
        self.closing.set()
        self._jobs.put(None)
        if self._last is not None and not self._last.done():
            self._wake()
        if self._thread is not threading.current_thread():  # the garbage collector may run there
            self._thread.join(patience)
            if self._thread.is_alive():
                leave(self._thread)
        if self._last is not None and self._last.done():
            forget_locals(self._last.exception())

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call, args = job
            if self.closing.is_set():
                # The job before it may have ended half-way: a peer that still waits for the rest
                # would receive messages of this job instead, and abort on one that is longer.
                future.set_exception(RuntimeError("this rank has closed the group"))
                continue
            try:
                call(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            finally:
                # They would keep what they use until the next job.
                del job, future, call, args
