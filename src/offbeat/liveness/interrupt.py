"""Ctrl-C in a wait: Python runs the handler of a signal only after the call of torch has returned.

So the thread of the heartbeat reads which signals have come, from the descriptor to which the
interpreter writes them at once, and ends the wait.
"""

import math
import os
import signal
import socket
import threading
import time
import weakref
from typing import final


@final
class Interrupts:
    """SIGINT as it comes, for all replicas of a process.

    Reads nothing where another library has set a wakeup descriptor (``signal.set_wakeup_fd``).
    Handlers other than Python's own may let the script go on, and end no wait.
    """

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._users = weakref.WeakSet[object]()
        self._heard = -math.inf
        os.register_at_fork(after_in_child=self._end)

    def open(self, user: object) -> None:
        """Read signals for ``user`` too; has an effect in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._users.add(user)
        if self._pair is None:
            self._pair = socket.socketpair()
            for end in self._pair:
                end.setblocking(False)
        self._set(self._pair[1].fileno(), instead_of=-1)  # again: an event loop may have reset it

    def close(self, user: object) -> None:
        """Read no signals for ``user``; after the last, give the descriptor back."""
        self._users.discard(user)
        if not self._users and threading.current_thread() is threading.main_thread():
            self._end()

    def begin_wait(self) -> None:
        """Drop signals from before a wait of the main thread: the script has handled them."""
        if threading.current_thread() is threading.main_thread():
            self._read()

    def came_in(self, since: float | None) -> bool:
        """Return whether SIGINT has come in a wait that lasts ``since`` then, None for no wait.

        From any thread.
        """
        now = time.monotonic()  # before the look: it may find a signal from before a later wait
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in self._read() and is_default:
            self._heard = now
        return since is not None and since < self._heard

    def _read(self) -> bytes:
        try:
            return b"" if (pair := self._pair) is None else pair[0].recv(4096)
        except OSError:  # none has come, or it was closed meanwhile
            return b""

    def _set(self, descriptor: int, instead_of: int) -> None:
        """Let the interpreter write signals to ``descriptor``, unless another library reads."""
        before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if before != instead_of:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)

    def _end(self) -> None:
        if self._pair is not None:
            pair, self._pair = self._pair, None
            self._set(-1, instead_of=pair[1].fileno())
            for end in pair:
                end.close()


interrupts = Interrupts()
