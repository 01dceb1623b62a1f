"""The one key of the store that every rank reads: the agreed error, and what leads to one."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from offbeat.liveness.failure import PeerLost, Phase
from offbeat.liveness.store.client import TimedStore

KEY = "status"


class AgreedError(NamedTuple):
    """The error that all ranks raise."""

    kind: str  # "user" or "lost"
    text: str

    @classmethod
    def of(cls, error: Exception) -> "AgreedError":
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
    loss: str  # why it counts as lost


class Failure(NamedTuple):
    """An exchange that has failed on ``rank``."""

    rank: int
    phase: Phase
    timeout: float | None  # seconds, if it has timed out

    def precedes(self, other: "Failure | None") -> bool:
        """Return whether ``other`` may follow from it: a rank that times out breaks connections."""
        return other is None or (other.timeout is None and self.timeout is not None)


class JoinRequest(NamedTuple):
    """A rank that waits to join, or to leave if it takes part; ``others`` join with it."""

    rank: int
    number: int  # of the request, since a rank may have several one after the other
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, fields: Sequence[Any]) -> "JoinRequest":
        """Return the request that JSON has made a list of."""
        rank, number, others = fields
        return cls(rank, number, tuple(others))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that join."""
        return self.rank, *self.others


HearRequest = Callable[[JoinRequest | None], None]


class Status(NamedTuple):
    """What ranks tell all others, None for nothing.

    Attributes:
        agreed: the error of all ranks.
        failure: the first exchange that has failed.
        silent: a rank without heartbeats.
        left: the first rank that has left.
        front: of the ranks that wait in a call of all ranks, one that is in the latest call.
        request: a rank that asks to join or to leave.
    """

    agreed: AgreedError | None = None
    failure: Failure | None = None
    silent: Silence | None = None
    left: int | None = None
    front: int | None = None
    request: JoinRequest | None = None

    @classmethod
    def parse(cls, text: str) -> "Status":
        """Read JSON."""
        agreed, failure, silent, left, front, request = json.loads(text)
        if failure is not None:
            rank, phase, timeout = failure
            failure = Failure(rank, Phase(*phase), timeout)
        said = agreed and AgreedError(*agreed), failure, silent and Silence(*silent), left, front
        return cls(*said, request and JoinRequest.of(request))


class StatusRecord:
    """The status in the store; ``text``: as it was last read or written."""

    def __init__(self, store: TimedStore) -> None:
        """Write an empty status, unless another rank has written one."""
        self._store = store
        self.text = store.compare_set(KEY, "", json.dumps(Status())).decode()

    @property
    def status(self) -> Status:
        """The parsed ``text``."""
        return Status.parse(self.text)

    def read(self) -> Status:
        """Read the status; it is empty where all ranks have left, which deletes it."""
        self.text = self._store.find(KEY) or json.dumps(Status())
        return self.status

    def post(self, **status: Any) -> Status:
        """Write those fields of ``status`` that no rank has written before; return what stands."""
        return self.change(
            lambda old: old._replace(
                **{name: new for name, new in status.items() if getattr(old, name) is None}
            )
        )

    def change(self, update: Callable[[Status], Status]) -> Status:
        """Write what ``update`` makes of the status; return what stands.

        It is called again on what another rank has written meanwhile. No two ranks change the same
        field one after the other, so that a thousand ranks at once make two attempts each.
        """
        text = self.text
        while (wanted := update(Status.parse(text))) != Status.parse(text):
            before, text = text, self._store.compare_set(KEY, text, json.dumps(wanted)).decode()
            if text in (before, json.dumps(wanted)):  # the former where the key was deleted
                break
        self.text = text
        return Status.parse(text)
