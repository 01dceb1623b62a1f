"""What the signs of all processes come to: members, steps, losses, joins, seconds lost."""

from dataclasses import dataclass, field
from statistics import median
from typing import Literal, final

from rich.markup import escape
from rich.table import Table

from offbeat.kit import quantity
from offbeat.kit.terminal import figures
from offbeat.liveness.heartbeats import heartbeat
from offbeat.store.runs import Process, Runs

USUAL = 32  # times between two steps whose median is usual
SPARE = 2.0  # seconds beyond three times the usual ones after which a pause is lost time
QUIET = 3.0  # seconds without a sign after which a member is shown as silent
State = Literal["waiting", "starting", "training", "ended"]


@dataclass(frozen=True)
class Member:
    """A process of the run; ``silent``: seconds since its last sign."""

    rank: int | None
    node: str
    step: int
    state: str
    silent: float


@dataclass(frozen=True)
class Change:
    """A rank that was lost or has joined, at about this step."""

    rank: int | None
    step: int


@dataclass(frozen=True)
class Status:
    """The state of a store.

    Attributes:
        name: the name of its runs.
        run: the number of the latest run, from 1; 0 before the first.
        state: of this run.
        workers: how many processes start a run, if that is given.
        waiting: processes that wait for a run.
        step: the steps of the rank that is furthest.
        members: the ranks that take part.
        lost: ranks that were silent for long, or ended by an exception.
        joined: ranks that have joined.
        seconds_lost: time in which no rank made a step, beyond what is usual between two steps.
    """

    name: str
    run: int
    state: State
    workers: int | None
    waiting: int
    step: int
    members: list[Member]
    lost: list[Change]
    joined: list[Change]
    seconds_lost: float

    @property
    def line(self) -> str:
        """One line for a terminal."""
        if not self.run:
            out_of = "" if self.workers is None else f" of {self.workers}"
            return f"run 0: {self.state}, {self.waiting}{out_of} processes"
        silent = sum(member.silent > QUIET for member in self.members)
        members = f"{len(self.members)} members" + (f" ({silent} silent)" if silent else "")
        counts = f"{members}, {len(self.lost)} lost, {len(self.joined)} joined"
        lost = f"{quantity.seconds(self.seconds_lost)} lost" if self.seconds_lost else "0 s lost"
        return f"run {self.run}: {self.state}, step {self.step}, {counts}, {lost}"

    def table(self, address: str) -> Table:
        """Return it for people."""
        out_of = "" if self.workers is None else f" of {self.workers}"
        caption = f"waiting for a run: {self.waiting}{out_of}" if self.waiting else None
        rows = [
            [escape(m.node), "?" if m.rank is None else str(m.rank), str(m.step), m.state]
            for m in self.members
        ]
        title = f"store {address}  {self.line}"
        return figures(title, ("rank", "step", "state"), rows, caption)


@final
@dataclass(eq=False)
class History:
    """Follows the runs of a store from look to look."""

    runs: Runs
    lost: dict[str, Change] = field(default_factory=dict)
    joined: dict[str, Change] = field(default_factory=dict)
    seconds_lost: float = 0.0
    _run: int = 0
    _step: int = 0
    _since: float | None = None  # when this step was seen first
    _usual: list[float] = field(default_factory=list)

    def look(self) -> Status:
        """Return the present status; after each look of the runs."""
        runs = self.runs
        if runs.run != self._run:
            self._run, self._step, self._since, self.seconds_lost = runs.run, 0, None, 0.0
            self._usual, self.lost, self.joined = [], {}, {}
        members = runs.members()
        present = [p for p in members if runs.is_living(p)]
        is_training = any(p.sign.state == "trains" for p in present)
        step = max((p.sign.steps for p in members), default=0)
        for process in members:
            self._follow(process)
        self._count(step, is_training)
        state: State = "training" if is_training else "starting"
        if not runs.is_on:
            state = "ended" if any(p.was_training for p in members) else "waiting"
        return Status(
            *(runs.about.name, runs.run, state, runs.about.workers),
            len(runs.waiting()),
            step,
            [self._member(p) for p in present],
            [*self.lost.values()],
            [*self.joined.values()],
            round(self.seconds_lost, 1),
        )

    def _member(self, process: Process) -> Member:
        silent = round(max(0.0, self.runs.clock - process.changed), 1)
        sign = process.sign
        state = f"silent for {silent:.0f} s" if silent > QUIET else sign.state
        return Member(sign.rank, sign.node, sign.steps, state, silent)

    def _follow(self, process: Process) -> None:
        sign, change = process.sign, Change(process.sign.rank, process.sign.steps)
        silence = self.runs.clock - process.changed
        is_silent = silence > heartbeat.MUTE_AFTER and sign.state == "trains"
        if process.was_training and process.place and process.place.rank is None:
            step = max(sign.steps, self._step)  # its own count begins with its first sign
            self.joined.setdefault(process.name, Change(sign.rank, step))
        if is_silent or (process.was_training and sign.state == "failed"):
            self.lost.setdefault(process.name, change)
        else:
            self.lost.pop(process.name, None)  # it was suspended

    def _count(self, step: int, is_training: bool) -> None:
        """Count the seconds in which no rank has made a step."""
        clock = self.runs.clock
        if step > self._step and self._since is not None and self._step > 0:
            pause = clock - self._since
            usual = median(self._usual) if self._usual else pause
            self._usual = [*self._usual, pause][-USUAL:]
            if pause > 3 * usual + SPARE:
                self.seconds_lost += pause - usual
        if step != self._step or not is_training:
            self._step, self._since = step, clock
