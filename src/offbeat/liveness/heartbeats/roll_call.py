"""The roll call at the start: every rank gives its word, or is missed by its name.

The first rank alone reads all words, and tells the others what follows from them. In a world of a
thousand ranks that is a thousand words to read in one call, and not a million.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import final

from torch.distributed import ProcessGroup

from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.liveness.lane import Lane
from offbeat.liveness.store.client import TimedStore
from offbeat.platform.process_group import (
    TIMEOUT,
    end_waits,
    has_connections,
    receive_hello,
    send_hello,
    timeout_of,
)

SEARCH_AFTER = 5.0  # seconds until one of the waiting ranks finds out who is missing
WARN_AFTER = 15.0  # seconds until it warns about them
POLL = 1.0  # seconds between two looks at the store, at most


def roll_call(
    word: str,
    conclude: Callable[[list[str]], str],
    heartbeat: Heartbeat,
    store: TimedStore,
    group: ProcessGroup | None,
) -> str:
    """Return what the first rank concludes from all words; all ranks must call.

    ``conclude`` is given the words in the order of ``heartbeat.ranks``, on the first of them.

    A rank that is late is waited for until the timeout of ``group``, the process group in which
    the ranks run already, if there is one. Raises :class:`PeerLost` on all ranks, with the name
    of the rank, when that time is over, or as soon as a rank is known to have ended: by its
    heartbeat if it has called, and otherwise by its connections in ``group``.

    A few operations on the store per rank, and one per second while it waits.
    """
    rank, ranks = heartbeat.rank, heartbeat.ranks
    with heartbeat.attending(), heartbeat.explaining():
        store.set(str(rank), word)
        _answer(rank, store, group)
        store.add("here", 1)
        if rank == ranks[0]:
            _wait_until(lambda: store.add("here", 0) == len(ranks), heartbeat, store, group)
            said = store.multi_get([str(other) for other in ranks])
            store.set("conclusion", conclude([word.decode() for word in said]))
        _wait_until(lambda: store.check(["conclusion"]), heartbeat, store, group)
        # A rank that comes after the others have given up must not go on alone.
        heartbeat.look_for_agreed_error()
        return store.get("conclusion").decode()


def hear(key: str, heartbeat: Heartbeat, store: TimedStore) -> str:
    """Wait until another rank, which has come to the roll call, writes ``key``; return its text."""
    with heartbeat.attending(), heartbeat.explaining():
        since = time.monotonic()
        while not store.check([key]):
            heartbeat.raise_agreed_error()
            _pause(time.monotonic() - since)
        return store.get(key).decode()


def _wait_until(
    is_over: Callable[[], bool],
    heartbeat: Heartbeat,
    store: TimedStore,
    group: ProcessGroup | None,
) -> None:
    limit = (timeout_of(group) if group is not None else TIMEOUT).total_seconds()
    since, is_searching = time.monotonic(), False
    search: _Search | None = None
    while not is_over():
        heartbeat.raise_agreed_error()
        waited = time.monotonic() - since
        if waited > limit:
            missing = _missing(heartbeat.ranks, store)
            raise heartbeat.report_error(
                PeerLost(
                    f"ranks {missing} have not called replicate() within {waited:.0f} s, the "
                    "timeout of the process group; call it on all ranks at about the same time, "
                    "or give init_process_group() a longer timeout"
                )
            )
        if waited > SEARCH_AFTER and not is_searching:
            # One rank for all: in a large world the store could not serve everybody's search.
            is_searching = True
            if store.add("searches", 1) == 1:
                search = _Search(heartbeat, store, group)
        if search is not None:
            search.look(waited)
        _pause(waited)


def _pause(waited: float) -> None:
    time.sleep(min(POLL, max(0.005, waited / 10)))


@final
class _Search:
    """Finds out which ranks are missing, and whether one of them has ended.

    A missing rank has no heartbeat yet. But ``group`` has a connection to it, which is closed
    when its process ends: a receive posted there fails then. A rank that is merely late sends,
    once it comes, what the receive waits for, so that nothing stays posted.
    """

    def __init__(self, heartbeat: Heartbeat, store: TimedStore, group: ProcessGroup | None) -> None:
        self._heartbeat, self._store = heartbeat, store
        self._group = group if group is not None and has_connections(group) else None
        self._asked: set[int] = set()
        self._ended: dict[int, RuntimeError] = {}
        self._has_warned = False

    def look(self, waited: float) -> None:
        """Look once, after waiting for so many seconds; raise if a missing rank has ended."""
        missing = _missing(self._heartbeat.ranks, self._store)
        if waited > WARN_AFTER and missing and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rank {self._heartbeat.rank}: ranks {missing} have not called replicate() after "
                f"{waited:.0f} s; waiting for them",
                RuntimeWarning,
                stacklevel=2,
            )
        for rank in missing:
            if self._group is not None and rank not in self._asked:
                self._asked.add(rank)
                self._ask(rank, self._group)
        for rank, error in list(self._ended.items()):
            if rank in missing:
                raise self._heartbeat.report_error(
                    PeerLost(
                        f"rank {rank} is lost: it ended, or destroyed its process group, before "
                        f"it called replicate() ({error}). Look at the end of its log"
                    )
                )

    def _ask(self, rank: int, group: ProcessGroup) -> None:
        # The rank may come at this moment: whoever writes first decides whether it must answer.
        if self._store.compare_set(f"asked{rank}", "", str(self._heartbeat.rank)) == b"here":
            return

        def listen() -> None:
            try:
                receive_hello(group, rank)
            except RuntimeError as error:
                self._ended[rank] = error

        lane = Lane("offbeat-search", wake=lambda: end_waits(group))
        lane.submit(listen).add_done_callback(lambda _: lane.close())


def _answer(rank: int, store: TimedStore, group: ProcessGroup | None) -> None:
    """Complete the receive that a search has posted for this rank, if there is one."""
    asked_by = store.compare_set(f"asked{rank}", "", "here")
    if asked_by != b"here" and group is not None:
        with contextlib.suppress(RuntimeError):  # the searching rank has ended meanwhile
            send_hello(group, int(asked_by))


def _missing(ranks: Sequence[int], store: TimedStore) -> list[int]:
    return [rank for rank in ranks if not store.check([str(rank)])]
