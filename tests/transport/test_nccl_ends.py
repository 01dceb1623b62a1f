"""How groups of NCCL end, with stand-ins for them: on processes without a GPU."""

import threading

from offbeat.platform import nccl


class Broken:
    """A group whose kernels end when it is aborted, and which frees its memory once all have."""

    all_end = threading.Barrier(2, timeout=20)

    def __init__(self) -> None:
        self.freed = 0

    def abort(self) -> None:
        self.all_end.wait()
        self.freed += 1


def test_broken_groups_are_aborted_at_once_and_once() -> None:
    groups = [Broken(), Broken()]
    for group in (*groups, *groups):
        nccl.abort(group)
    for group in groups:
        nccl._aborted.pop(group).join(20)
        assert group.freed == 1
