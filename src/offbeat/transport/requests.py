"""Requests of one word, answered in the order in which they arrive, from any member.

Gloo (torch 2.13) can receive from any rank, but that wait cannot be ended: neither a lost rank nor
a timeout wakes it. Nor does a work report completion before it was waited for. So one receive is
posted for each caller, and a thread polls the memory.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import Work

from offbeat.transport.group import Group

TAG = 2**29  # differs from the tags of messages, and of the receive that ends waits
POLL = 1e-3  # seconds between two looks at the memory


def call(word: int, peers: Sequence[int], group: Group) -> None:
    """Send ``word``, which is not 0, to ``peers``; block until all have received it."""
    message = torch.tensor([word], device="cpu")
    group.meter.sent(group.axis, message.nbytes * len(peers), len(peers))
    with group.detector.explaining():
        for work in [group.process_group.send([message], peer, TAG) for peer in peers]:
            work.wait()


@dataclass(eq=False)
class Requests:
    """Requests that the members ``callers`` make to this one; for the group's own thread only.

    Posts one receive of 8 bytes for each caller at a time.
    """

    group: Group
    callers: Sequence[int]
    _posted: dict[int, tuple[Tensor, Work]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Post a receive for the first request of each caller."""
        for caller in self.callers:
            self.expect(caller)

    def expect(self, caller: int) -> None:
        """Post a receive for the next request of ``caller``."""
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self.group.detector.explaining():
            self._posted[caller] = word, self.group.process_group.recv([word], caller, TAG)

    def next(self) -> tuple[int, int] | None:
        """Wait for a request; return (caller, word), or None when the lane closes.

        Raises the agreed error of the ranks as soon as there is one.
        """
        while not self.group.lane.closing.wait(POLL):
            self.group.detector.raise_agreed_error()
            for caller, (word, work) in self._posted.items():
                if int(word) != 0:
                    del self._posted[caller]
                    with self.group.detector.explaining():
                        work.wait()
                    return caller, int(word)
        # Ended by the lane: nothing may be written there later.
        for _, work in self._posted.values():
            with contextlib.suppress(RuntimeError):
                work.wait()
        return None
