"""The runs of a store: which processes start one, which may join it, and when it is over.

All of it follows from the signs of the processes, so that a store that was started again knows it
as soon as they have found it.
"""

import json
from dataclasses import dataclass, field
from typing import final

from torch.distributed import Store

from offbeat.kit.warning import warn
from offbeat.liveness.heartbeats import heartbeat
from offbeat.transport.run import token
from offbeat.transport.run.rendezvous import ANSWERS, ENDED, KEY, PLACE, SIGNS, About, Place, Sign

LATE = 2.5  # seconds without a sign after which a process is not counted among those that start
RETURN = 3.0  # seconds in which the ranks find a store that was started again
FORGET = 300.0  # seconds after which the sign of a process that ended is deleted
LOOK = 1.0  # seconds of the clock for one look, at most: those of a store that was suspended


@final
@dataclass(eq=False)
class Process:
    """A process as the store sees it; times are seconds of the store's clock."""

    name: str
    sign: Sign
    came: float
    changed: float
    place: Place | None = None
    was_training: bool = False


@final
@dataclass(eq=False)
class Runs:
    """Answers processes.

    Attributes:
        store: the store.
        about: the name of its runs, and how many processes start one.
        settle: seconds after the first process in which others may come, where no number is given.
        run: the number of the latest run.
        processes: all that have come, in the order in which they came.
        clock: seconds for which it has looked.
    """

    store: Store
    about: About
    settle: float = 10.0
    run: int = 0
    processes: dict[str, Process] = field(default_factory=dict)
    clock: float = 0.0
    _looked: float | None = None
    _strange: set[str] = field(default_factory=set)  # keys that were told of
    _place: str = PLACE

    def __post_init__(self) -> None:
        """Say what this store is; raises ``ValueError`` for a token that is too short."""
        self._place = token.keys_of_run() + PLACE
        self.store.set(f"{self._place}/{KEY}", json.dumps(self.about))
        # Last: whoever has read it may read the above.
        self.store.set(f"{PLACE}/{token.KEY}", token.challenge())

    def look(self, now: float) -> None:
        """Read all signs and answer; ``now``: seconds, at least one look each second."""
        if self._looked is not None:
            self.clock += min(now - self._looked, LOOK)
        self._looked = now
        self._read()
        waiting = self.waiting()
        if self.is_on:
            self._complete(waiting)
            self._let_join([p for p in waiting if p.place is None and p.sign.joins])
        elif self.clock > RETURN:
            self._start([p for p in waiting if self.clock - p.changed < LATE])

    def waiting(self) -> list[Process]:
        """Return the processes without an answer, in the order in which they came."""
        living = filter(self.is_living, self.processes.values())
        return [p for p in living if p.place is None and p.sign.state == "waits"]

    def is_living(self, process: Process) -> bool:
        """Return whether a process has not ended, as far as its signs tell."""
        silence = self.clock - process.changed
        return process.sign.state not in ENDED and silence <= heartbeat.SILENT_AFTER

    def members(self) -> list[Process]:
        """Return the processes of the latest run, also those that have ended."""
        found = [p for p in self.processes.values() if p.place and p.place.run == self.run]
        return sorted(found, key=lambda p: (p.sign.rank is None, p.sign.rank or 0))

    @property
    def is_on(self) -> bool:
        """Whether a run starts or goes on."""
        return any(self.is_living(p) and p.sign.state != "done" for p in self.members())

    def _read(self) -> None:
        start = f"{self._place}/{SIGNS}"
        keys = [key for key in self.store.list_keys() if key.startswith(start)]
        new = []
        for key, text in zip(keys, self.store.multi_get(keys) if keys else (), strict=True):
            name, sign = key.removeprefix(start), self._parsed(key, text)
            if sign is None:
                continue
            process = self.processes.get(name)
            if process is None:
                new.append(Process(name, sign, self.clock, self.clock, sign.place))
            elif process.sign != sign:
                process.sign, process.changed = sign, self.clock
            elif self.clock - process.changed > FORGET:
                self.store.delete_key(key)
        new.sort(key=lambda p: (p.sign.node, p.sign.local_rank))  # those of a node in a row
        self.processes |= {process.name: process for process in new}
        for process in self.processes.values():
            process.was_training |= process.sign.state in ("trains", "done")
            self.run = max(self.run, process.place.run if process.place else 0)

    def _parsed(self, key: str, text: bytes) -> Sign | None:
        """Return a sign; None for one that is none, such as that of another version."""
        try:
            return Sign.parse(text.decode())
        except (TypeError, ValueError) as error:
            if key not in self._strange:
                self._strange.add(key)
                warn(f"{key!r} is no sign of a process of this version of offbeat ({error})")
            return None

    def _answer(self, process: Process, place: Place) -> None:
        process.place = place
        self.store.set(f"{self._place}/{ANSWERS}{process.name}", json.dumps(place))

    def _start(self, waiting: list[Process]) -> None:
        """Start a run once enough processes have come."""
        if not waiting:
            return
        if self.about.workers is None:
            if self.clock - waiting[0].came < self.settle:
                return
        elif len(waiting) < self.about.workers:
            return
        first = waiting[: self.about.workers]
        nodes: dict[str, list[Process]] = {}
        for process in first:
            nodes.setdefault(process.sign.node, []).append(process)
        ranks, layout = 0, list[tuple[int, ...]]()
        for mates in nodes.values():
            layout.append(tuple(range(ranks, ranks + len(mates))))
            ranks += len(mates)
        self.run += 1
        for rank, process in enumerate(p for mates in nodes.values() for p in mates):
            self._answer(process, Place(self.run, rank, tuple(layout)))

    def _complete(self, waiting: list[Process]) -> None:
        """Give the place of a process that ended before the start to another one."""
        for process in self.members():
            is_missing = not self.is_living(process) and not process.was_training
            if is_missing and process.place and process.place.rank is not None and waiting:
                self._answer(waiting.pop(0), process.place)
                process.place = None

    def _let_join(self, waiting: list[Process]) -> None:
        """Tell processes of the run, where one of its members has been seen after they came.

        Not before all that start it have begun: they wait for the place of one that has ended.
        """
        members = self.members()
        if any(not p.was_training and p.place and p.place.rank is not None for p in members):
            return
        training = [p for p in members if p.sign.state == "trains"]
        for process in waiting:
            if any(member.changed > process.came for member in training):
                nodes = next(p.place.nodes for p in training if p.place)
                self._answer(process, Place(self.run, None, nodes))
