"""A signal upon which a rank leaves its run, such as the notice of a preemption."""

import os
import signal
from types import FrameType

from offbeat.replica.replica import Replica


def leave_on_signal(replica: Replica, number: int = signal.SIGTERM) -> None:
    """Call :meth:`Replica.leave` when the signal comes; the second time what it did before.

    Call it in the main thread, as Python asks of whoever handles signals, and end the training
    loop when ``replica.has_left``. The first signal does not end the process, unless the replica
    is detached, or in a forked child.

    Raises ``ValueError`` in another thread, where a loss ends the run, and for what is no signal
    that can be handled.

    >>> import inspect
    >>> list(inspect.signature(leave_on_signal).parameters)
    ['replica', 'number']
    """
    replica.require_may_leave()

    process = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        try:
            if os.getpid() == process and not replica.has_left:
                return replica.leave()
        except ValueError:  # it is detached
            pass
        signal.raise_signal(number)

    try:
        before = signal.signal(number, leave)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"leave_on_signal() got {number!r}, expected a signal that can be handled, such as "
            f"signal.SIGTERM ({error})"
        ) from None
