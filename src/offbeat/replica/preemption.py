"""A signal upon which a rank leaves its run, such as the notice of a preemption."""

import signal
from types import FrameType

from offbeat.replica.replica import Replica


def leave_on_signal(replica: Replica, number: int = signal.SIGTERM) -> None:
    """Call :meth:`Replica.leave` when the signal comes; the second time what it did before.

    Call it in the main thread, as Python asks of whoever handles signals, and end the training
    loop when ``replica.has_left``. The first signal does not end the process.

    Raises ``ValueError`` in another thread, or where a loss ends the run.

    >>> import inspect
    >>> list(inspect.signature(leave_on_signal).parameters)
    ['replica', 'number']
    """
    replica.require_may_leave()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        replica.leave()

    before = signal.signal(number, leave)
