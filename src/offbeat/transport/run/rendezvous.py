"""How a process that is started with ``OFFBEAT_STORE`` finds its place among the ranks of a run.

It writes a sign of life each second until Python ends. ``offbeat store`` reads the signs, and
answers each one that waits: with its number among the ranks that start a run, or with the run that
goes on. A store that was started again learns all it needs from the signs.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from typing import NamedTuple, final

from torch.distributed import Store

from offbeat.kit.warning import warn
from offbeat.liveness.heartbeats import crossed_waits
from offbeat.liveness.heartbeats.diagnosis import store_lost
from offbeat.liveness.heartbeats.roll_call import WARN_AFTER
from offbeat.liveness.store.client import TimedStore
from offbeat.liveness.store.ticker import Ticker
from offbeat.platform.tcp_store import connect_store
from offbeat.transport.run import token

VARIABLE = "OFFBEAT_STORE"
NODE = "OFFBEAT_NODE"
PLACE = "offbeat store"  # prefix of the keys, after that of the run
KEY = "store"  # what the store says of itself
SIGNS, ANSWERS = "signs/", "answers/"
ENDED = ("ended", "failed")  # states
BEAT = 1.0  # seconds between two signs
POLL = 0.1  # seconds between two looks for an answer
GREETING = 4.0  # seconds in which a store that has just begun says what it is


class About(NamedTuple):
    """What a store says of itself: the name of its runs, and how many ranks start one."""

    name: str
    workers: int | None


class Place(NamedTuple):
    """The answer to a process.

    Attributes:
        run: the number of the run.
        rank: its rank among those that start the run; None for a process that may join it.
        nodes: the ranks of each node that start it.
    """

    run: int
    rank: int | None
    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read JSON."""
        run, rank, nodes = json.loads(text)
        return cls(run, rank, tuple(map(tuple, nodes)))


class Sign(NamedTuple):
    """The sign of life of a process.

    Attributes:
        number: the number of the sign.
        node: its ``OFFBEAT_NODE``, or its host and launcher.
        local_rank: its number there.
        joins: whether it may join a run that goes on.
        place: the answer it has got.
        rank: its rank, once it has one.
        steps: the steps that its rank has made.
        state: "waits" for an answer, "starts", "trains", "done" after ``detach()``; at
            last "ended", or "failed" by an exception.
    """

    number: int
    node: str
    local_rank: int
    joins: bool
    place: Place | None = None
    rank: int | None = None
    steps: int = 0
    state: str = "waits"

    @classmethod
    def parse(cls, text: str) -> "Sign":
        """Read JSON; raises ``TypeError`` or ``ValueError`` for what is no sign."""
        sign = cls(*json.loads(text))
        numbers = sign.number, sign.local_rank, sign.joins, sign.steps
        kinds = {*map(type, numbers)} - {int, bool} | {type(sign.node), type(sign.state)}
        if kinds != {str}:
            raise ValueError(f"{text[:80]!r}: numbers and texts are in other places")
        place = sign.place and Place.parse(json.dumps(sign.place))
        return sign._replace(place=place)


_known: "tuple[int, Place, Store] | None" = None  # of this process, with its number
_finding = threading.Lock()


def place_of_this_process(joins: bool) -> tuple[Place, Store]:
    """Return its place, and a client of the store; waits until it has one."""
    global _known
    with _finding:
        if _known is None or _known[0] != os.getpid():
            address, name = _address()
            store = connect_store(address)
            try:
                timed = TimedStore(store, returns=True)
                token.require_same_token(_challenge(timed.under(PLACE), address), address)
                timed = timed.under(token.keys_of_run() + PLACE)
                _require_fitting(About(*json.loads(timed.get(KEY))), name, address)
                place = Presence(timed, joins).place()
            except RuntimeError as error:
                raise store_lost(error) from error
            _known = os.getpid(), place, store
        return _known[1:]


def _address() -> tuple[str, str]:
    text = os.environ.get(VARIABLE, "")
    address, _, name = text.partition("/")
    if not address:
        raise ValueError(
            f"{VARIABLE} is {text!r}, expected 'host:port' or 'host:port/name', where `offbeat "
            "store --port PORT` runs"
        )
    return address, name


def _challenge(store: TimedStore, address: str) -> str:
    since = time.monotonic()
    while (text := store.find(token.KEY)) is None:
        if time.monotonic() - since > GREETING:
            raise ValueError(
                f"{VARIABLE}: a store of torch is at {address}, but not one of `offbeat store`, "
                "which numbers the ranks; start that one, or pass World.at(...) as mesh"
            )
        time.sleep(POLL)
    return text


def _require_fitting(about: About, name: str, address: str) -> None:
    if name and name != about.name:
        raise ValueError(
            f"{VARIABLE}: the store at {address} is for the run {about.name!r}, and this process "
            f"for {name!r}; correct the address, or start another store with --name {name}"
        )
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if about.workers is not None and workers > about.workers:
        raise ValueError(
            f"{VARIABLE}: this launcher has started {workers} processes, and the store at "
            f"{address} begins a run with {about.workers}; pass it the number of all processes, "
            "--workers"
        )


@final
class Presence:
    """This process in a store, until Python ends."""

    def __init__(self, store: TimedStore, joins: bool) -> None:
        """Write the first sign."""
        self._store, self._name = store, uuid.uuid4().hex
        host, launcher = socket.gethostname(), os.environ.get("TORCHELASTIC_RUN_ID", "")
        node = os.environ.get(NODE) or f"{host}/{launcher}".rstrip("/")
        self._sign = Sign(0, node, int(os.environ.get("LOCAL_RANK", "0")), joins)
        self._process, self._changing = os.getpid(), threading.Lock()
        self._tick()
        self._ticker = Ticker(BEAT, "offbeat-presence")
        self._ticker.add(self._tick)
        crossed_waits.follow(self._ticker.wake)  # a run may be over before the next tick
        atexit.register(self._end)

    def place(self) -> Place:
        """Wait for the answer, also for hours: until a run has ended that it may not join."""
        since, has_warned = time.monotonic(), False
        while (text := self._store.find(ANSWERS + self._name)) is None:
            time.sleep(POLL)
            if time.monotonic() - since > WARN_AFTER and not has_warned:
                has_warned = True
                warn(
                    f"{VARIABLE}: no place in a run after {WARN_AFTER:.0f} s; the store waits for "
                    "more processes, or for the end of a run that this one does not join "
                    "(elastic=True). Its status tells which"
                )
        place = Place.parse(text)
        with self._changing:
            self._sign = self._sign._replace(place=place, rank=place.rank, state="starts")
        self._tick()
        return place

    def _tick(self) -> None:
        with self._changing, contextlib.suppress(RuntimeError):  # heartbeats tell of a lost store
            self._sign = self._next()
            self._store.set(SIGNS + self._name, json.dumps(self._sign))

    def _next(self) -> Sign:
        sign = self._sign
        phases = crossed_waits.ranks_here()
        if phases:
            steps = max(phase.steps for phase in phases.values())
            rank = next(iter(phases)) if sign.place and sign.place.rank is None else sign.rank
            sign = sign._replace(rank=rank, steps=steps, state="trains")
        elif sign.state == "trains":
            sign = sign._replace(state="done")
        return sign._replace(number=sign.number + 1)

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child
        self._store.limit(1.0)
        self._ticker.remove(self._tick, 1.0)
        with contextlib.suppress(RuntimeError):
            state = "failed" if hasattr(sys, "last_value") else "ended"
            self._store.set(SIGNS + self._name, json.dumps(self._sign._replace(state=state)))
        self._store.close()
