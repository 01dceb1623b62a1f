"""Small calls that a member answers whenever they come, whoever makes them.

Gloo (torch 2.13) can receive from anyone, but that wait cannot be ended: neither a lost peer nor
a time-out of our own wakes it. Nor do works tell whether they are complete before they were
waited for. So one receive is posted for each caller, and a thread looks at the memory.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import Work

from offbeat.comm.group import Group

TAG = 2**29  # apart from those of longer messages, and of the receive that ends waits
LOOK = 1e-3  # seconds between two looks at what has come


def call(word: int, peers: Sequence[int], group: Group) -> None:
    """Say ``word``, which is not 0, to ``peers``; blocks until all of them have heard it."""
    said = torch.tensor([word])
    with group.heartbeat.explaining():
        for work in [group.process_group.send([said], peer, TAG) for peer in peers]:
            work.wait()
    group.meter.sent(group.axis, said.nbytes * len(peers), len(peers))


@dataclass(eq=False)
class Calls:
    """Those that the members ``callers`` of a group make to this one; for its lane only.

    Takes one receive of 8 bytes for each caller at a time.
    """

    group: Group
    callers: Sequence[int]
    _words: dict[int, Tensor] = field(init=False, default_factory=dict)
    _posted: dict[int, Work] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Be ready for the first call of each."""
        for caller in self.callers:
            self.expect(caller)

    def expect(self, caller: int) -> None:
        """Be ready for one more call of ``caller``."""
        self._words[caller] = word = torch.zeros(1, dtype=torch.int64)
        with self.group.heartbeat.explaining():
            self._posted[caller] = self.group.process_group.recv([word], caller, TAG)

    def next(self) -> tuple[int, int] | None:
        """Who has called and with what word, as soon as anyone has; None when the lane closes.

        Raises the ranks' verdict as soon as there is one.
        """
        while not self.group.lane.closing.wait(LOOK):
            self.group.heartbeat.require_no_verdict()
            for caller, word in self._words.items():
                if int(word) != 0:
                    with self.group.heartbeat.explaining():
                        self._posted.pop(caller).wait()
                    return caller, int(self._words.pop(caller))
        for work in self._posted.values():  # the lane has ended them; nobody may write there later
            with contextlib.suppress(RuntimeError):
                work.wait()
        return None
