"""The one key of the store that every rank reads: the verdict, and what leads to one."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from offbeat.liveness.failure import PeerLost, Phase
from offbeat.liveness.store import TimedStore

KEY = "notices"


class Verdict(NamedTuple):
    """The error that all ranks raise."""

    kind: str  # "user" or "lost"
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Verdict":
        """Describe ``error``."""
        return cls("user" if isinstance(error, ValueError) else "lost", str(error))

    @property
    def error(self) -> Exception:
        """The error to raise."""
        return (ValueError if self.kind == "user" else PeerLost)(self.text)


class Silence(NamedTuple):
    """A rank that one of its watchers counts as lost, until it writes another heartbeat."""

    rank: int
    beat: str  # its last heartbeat
    seconds: float


class Failure(NamedTuple):
    """An exchange that has failed on ``rank``."""

    rank: int
    phase: Phase
    timeout: float | None  # seconds, if it has timed out

    def precedes(self, other: "Failure | None") -> bool:
        """Return whether ``other`` may follow from it: a rank that times out breaks connections."""
        return other is None or (other.timeout is None and self.timeout is not None)


class Wish(NamedTuple):
    """A rank that waits to join."""

    rank: int
    number: int  # of the wish, since a rank may have several one after the other


class Notices(NamedTuple):
    """What ranks tell all others, None for nothing.

    Attributes:
        verdict: the error of all ranks.
        failure: the first exchange that has failed.
        silent: a rank without heartbeats.
        left: the first rank that has left.
        front: of the ranks that wait in a call of all ranks, one that is in the latest call.
        wish: a rank that is none of these, and wishes to be.
    """

    verdict: Verdict | None = None
    failure: Failure | None = None
    silent: Silence | None = None
    left: int | None = None
    front: int | None = None
    wish: Wish | None = None

    @classmethod
    def parse(cls, text: str) -> "Notices":
        """Read what :meth:`dump` has written."""
        verdict, failure, silent, left, front, wish = json.loads(text)
        if failure is not None:
            rank, phase, timeout = failure
            failure = Failure(rank, Phase(*phase), timeout)
        said = verdict and Verdict(*verdict), failure, silent and Silence(*silent), left, front
        return cls(*said, wish and Wish(*wish))

    def dump(self) -> str:
        """Return the notices as JSON."""
        return json.dumps(self)


class Board:
    """The notices in the store.

    Attributes:
        text: the notices as they were when they were last read or written.
    """

    def __init__(self, store: TimedStore) -> None:
        """Write empty notices, unless another rank has."""
        self._store = store
        self.text = store.compare_set(KEY, "", Notices().dump()).decode()

    @property
    def notices(self) -> Notices:
        """The notices as they were last read or written."""
        return Notices.parse(self.text)

    def read(self) -> Notices:
        """Read the notices; there are none where all ranks have left, which deletes them."""
        self.text = self._store.find(KEY) or Notices().dump()
        return self.notices

    def post(self, **notices: Any) -> Notices:
        """Write those of ``notices`` that no rank has written before; return those that stand."""
        return self.change(
            lambda old: old._replace(
                **{name: new for name, new in notices.items() if getattr(old, name) is None}
            )
        )

    def change(self, update: Callable[[Notices], Notices]) -> Notices:
        """Write what ``update`` makes of the notices; return those that stand.

        It is called again on what another rank has written meanwhile. No two ranks change the same
        notice one after the other, so that a thousand ranks at once make two attempts each.
        """
        text = self.text
        while (wanted := update(Notices.parse(text))) != Notices.parse(text):
            before, text = text, self._store.compare_set(KEY, text, wanted.dump()).decode()
            if text in (before, wanted.dump()):  # the former where the key was deleted
                break
        self.text = text
        return Notices.parse(text)
