"""Waits of the training thread, which end once the ranks have agreed on an error.

Gloo (torch 2.13) fails the waits for a connection that breaks, but not for a message of which it
has sent or received a part: that one lasts until the timeout of the process group, half an hour.
Of broadcasts of 200 MB, 2 of 3 did so when their root was killed half way, and of gossip in
messages of 100 MB, 1 of 5.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Work

from offbeat.liveness.failure import PeerLost
from offbeat.platform.process_group import end_waits
from offbeat.transport.group import Group

Result = TypeVar("Result")
MOMENT = 0.25  # seconds between two looks for an agreed error


def outlast(future: "Future[Result]", group: Group) -> Result:
    """Return the result of ``future``, which a thread of ``group`` sets."""
    is_agreed = False
    try:
        while True:
            try:
                return future.result(MOMENT)
            except TimeoutError:
                is_agreed = _look(group, is_agreed)
    except KeyboardInterrupt:
        _tell_of_interrupt(group)
        raise
    finally:
        # Its error refers to this frame: a cycle would keep works, and their sockets, alive.
        del future


def outlast_collectives(works: Sequence[Work], group: Group) -> None:
    """Wait for collectives of Gloo: a wait of limited time harms none of these."""
    try:
        for work in works:
            is_agreed = False
            while not _has_ended(work):
                is_agreed = _look(group, is_agreed)
    except KeyboardInterrupt:
        _tell_of_interrupt(group)
        raise


def outlast_messages(works: Sequence[Work], group: Group) -> None:
    """Wait for messages of Gloo, in a thread: to wait again is wrong, and for less time harmful."""
    outlast(group.waiter.submit(_wait_for, works), group)


def _has_ended(work: Work) -> bool:
    try:
        work.wait(timedelta(seconds=MOMENT))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises its error, if that was not just the end of the moment
    return True


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _look(group: Group, is_agreed: bool) -> bool:
    """Return whether there is an agreed error; raise it if there was one a moment ago.

    Not at once: in the meantime most waits end by themselves.
    """
    if is_agreed:
        # The buffers will be used again: no connection may write into them any more.
        end_waits(group.process_group, group.connected)
        group.detector.raise_agreed_error()
    return group.detector.has_agreed_error


def _tell_of_interrupt(group: Group) -> None:
    """Tell the other ranks whose wait Ctrl-C has ended: Python's handler runs between two looks.

    The exchange fails: they would go on without an error, for as long as they launch no other. A
    group without heartbeats, which the caller owns, stays as it is.
    """
    rank, phase = group.ranks[group.rank], group.detector.phase
    group.detector.report_error(PeerLost(f"rank {rank} was interrupted in {phase}: SIGINT"))
    if group.detector.has_agreed_error:
        end_waits(group.process_group, group.connected)
