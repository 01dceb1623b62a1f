"""The membership of a run that further ranks may join: who takes part, in one key of the store."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from offbeat.liveness.store.client import TimedStore

KEY = "membership"
ENDED = 2**62  # a number of changes after all others


class Membership(NamedTuple):
    """Who takes part in a run.

    Attributes:
        run: the number of the run, of all in this store, from 1; 0 before the first.
        change: how often ranks were lost or have joined.
        name: prefix of the keys of its links; "" if nobody can join, as after the end.
        nodes: the ranks of each node.
        lost: the ranks that it has lost.
    """

    run: int = 0
    change: int = 0
    name: str = ""
    nodes: tuple[tuple[int, ...], ...] = ()
    lost: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "Membership":
        """Return the membership that JSON has made a list of."""
        run, change, name, nodes, lost = fields
        return cls(run, change, name, tuple(map(tuple, nodes)), tuple(lost))

    @property
    def ranks(self) -> list[int]:
        """The ranks that take part, ascending."""
        return sorted(rank for node in self.nodes for rank in node)

    @property
    def next_rank(self) -> int:
        """The smallest number that no rank has had."""
        return len(self.ranks) + len(self.lost)


def name_after(name: str, change: int, request: int = 0) -> str:
    """Return the name of the links after one more ``change``: that by ``request``, or a loss.

    Every change has its own, so that no key is used twice.

    >>> name_after("run1", 0), name_after("run1.1", 1, request=4), name_after("run1.2 with 4", 2)
    ('run1.1', 'run1.2 with 4', 'run1.3')
    """
    after = f"{name.partition('.')[0]}.{change + 1}"
    return f"{after} with {request}" if request else after


def read_membership(store: TimedStore) -> Membership:
    """Return the latest membership, an empty one if there is none."""
    text = store.find(KEY)
    return Membership() if text is None else Membership.of(json.loads(text))


def write_membership(store: TimedStore, membership: Membership) -> None:
    """Write ``membership`` unless there is a later one, whoever of its ranks comes first."""
    text, wanted = store.find(KEY) or "", json.dumps(membership)
    while text != wanted and (not text or tuple(json.loads(text)[:2]) < membership[:2]):
        text = store.compare_set(KEY, text, wanted).decode()
