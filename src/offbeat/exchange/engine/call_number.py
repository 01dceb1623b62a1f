"""A number in every message of gradients, which shows that its sender is in another step."""

import torch
from torch import Tensor

from offbeat.platform.device import event_after, number_on_host
from offbeat.transport.group import Group

RANGE = 128  # whole numbers below it, and their halves, are exact in 16 bits


def number_of(group: Group) -> int:
    """Return the number of the call that this rank is in, for a message."""
    return group.detector.phase.calls % RANGE


def require_same_call(group: Group, sent: int, *received: float) -> None:
    """Raise ``ValueError`` on all ranks unless all numbers ``received`` are the one we ``sent``."""
    # Or the mean of the members': at most one of different numbers equals it, so that some rank
    # raises. A mean of two neighbours is half off; rounding errs by far less.
    if any(abs(number - sent) > 0.25 for number in received):
        raise group.detector.report_pairing()


class CallNumber:
    """Fills one entry of an averaged message with the number of the call its sender is in.

    Messages pair up by their order alone. If one rank makes a backward more than the others, its
    next message meets theirs of the next step, all sizes fit, and nothing else would tell. Ranks
    whose numbers of calls are equal in every exchange also made equally many of them in each step.
    """

    def __init__(self, group: Group, like: Tensor) -> None:
        self.group, self.sent = group, 0
        self.echo = number_on_host(like)  # the entry after the exchange
        self.arrived: torch.Event | None = None  # on an accelerator, when ``echo`` is there

    def write(self, entry: Tensor) -> None:
        """Fill ``entry`` (1), before the exchange."""
        if self.arrived is not None:
            self.arrived.synchronize()  # of the last backward, long over
            self._compare()
        self.sent = number_of(self.group)
        entry.fill_(self.sent)

    def read(self, entry: Tensor) -> None:
        """Compare the mean in ``entry`` (1), after the exchange; see :func:`require_same_call`."""
        # On an accelerator the host does not wait for the exchange; the next write() compares.
        self.echo.copy_(entry, non_blocking=True)
        self.arrived = event_after(entry)
        if self.arrived is None:
            self._compare()

    def _compare(self) -> None:
        self.arrived = None
        require_same_call(self.group, self.sent, float(self.echo))
