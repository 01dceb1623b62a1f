"""Who takes part in the training of a replica, and the calls that all of these make together."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from offbeat.attach.connection import Connection
from offbeat.elastic.generation import Generation
from offbeat.elastic.joining import admit
from offbeat.elastic.leaving import let_go
from offbeat.exchange import Algorithm, BoundGradients, BoundParameters, Exchanged
from offbeat.exchange.sharding import reshard
from offbeat.recipes.composed import compose
from offbeat.replica.availability import Availability
from offbeat.replica.backward import BackwardWatch
from offbeat.replica.consensus import Consensus
from offbeat.replica.saving import checkpoint
from offbeat.replica.switching import Switching
from offbeat.telemetry.recorder import Recorder
from offbeat.transport.world import World

if TYPE_CHECKING:  # importing it takes as long as all of offbeat
    from torch.distributed.checkpoint.stateful import Stateful

    from offbeat.replica.autopilot import Autopilot

Result = TypeVar("Result")


class Participation:
    """The part of a :class:`Replica` that follows changes of the set of ranks."""

    steps: int
    is_averaged: bool
    notes: list[str]
    gradients: BoundGradients
    parameters: BoundParameters
    _exchanged: Exchanged
    _members: Generation
    _connection: Connection
    _watch: BackwardWatch
    _use: Availability
    _consensus: Consensus
    _recorder: Recorder
    _schedule: Sequence[Algorithm]
    _gathering: list[Any]

    @property
    def world(self) -> World:
        """The layout of the ranks that take part."""
        return self._members.world

    def leave(self) -> None:
        """Announce that this rank leaves an elastic run; the others wait for nothing.

        Safe in a signal handler. Train on until :attr:`has_left` is true after a ``step()``: the
        first one in which all exchange, after all have heard of it, about two heartbeats. What
        this rank has not sent yet, residuals and push-sum mass, is then divided between the
        others, and this replica is detached. Their ``lost`` has its entry, with ``"left": 1``.
        Raises ``ValueError`` where a loss ends the run.
        """
        if not self.has_left:
            self.require_may_leave()
            self._members.admission.wants_to_leave = True

    def require_may_leave(self) -> None:
        """Raise ``ValueError`` if :meth:`leave` would."""
        self._use.require_open(also_shown=True)
        if not self._members.filler.is_elastic or self._members.node is not None:
            raise ValueError(
                f"leave() under {self._members.algorithm}: pass elastic=True to replicate(); and "
                "nodes of several ranks come and go as wholes, which one of them cannot decide"
            )

    @property
    def has_left(self) -> bool:
        """Whether this rank has left the run by :meth:`leave`."""
        return self._members.has_left

    def register(self, name: str, stateful: "Stateful", *, is_saved: bool = False) -> None:
        """Let ranks that join get the state of ``stateful``, such as a learning rate schedule.

        Call it on all ranks, with the same names. On one that has joined, it loads what
        ``stateful.state_dict()`` has returned on its donor: numbers, text, tensors, and lists,
        tuples and dicts of these. No communication.

        ``is_saved``: the state is part of :meth:`~Replica.state_dict`, as JSON, and loaded with it.
        """
        self._members.register(name, stateful, is_saved)

    def gather(self, text: str) -> list[str]:
        """Return what every rank passes, by rank; all ranks call, also inside ``consensus()``.

        All get the same, in an elastic run also of a rank that is lost at the end of the call.
        """
        self._use.require_open(also_shown=True)
        return self._together("gather", self._members.gather(text))

    def _together(self, verb: str | None, call: Callable[[], Result]) -> Result:
        reshard(self._gathering)
        return self._members.together(verb, call, lambda: self.steps, self._adopt)

    def _admit(self) -> None:
        """Let a rank in, if one waits to join and all have agreed on this step.

        Before, go on without one that was lost while all computed.
        """

        def let_in() -> None:
            if texts := admit(self._members, self._exchanged, self.steps):
                self._adopt(texts)

        if self._members.admission.begin_step():
            self._together(None, let_in)

    def _let_go(self) -> None:
        """Let a rank go, if one waits to leave and all have agreed on this step."""

        def part() -> None:
            if (texts := let_go(self._members, self.steps)) and not self.has_left:
                self._adopt(texts)

        if self._members.admission.is_asked:
            self._together(None, part)

    def switch(self, algorithm: str | Algorithm) -> None:
        """Go on with another algorithm, in place, from the next step on; all ranks call.

        Call it between a ``step()`` and the next backward that exchanges. An exchange that both
        algorithms have goes on undisturbed. Another one in the parameters slot begins with the
        average of all ranks, as after :meth:`finish`, unless the algorithm before kept them equal;
        if only the new one does, the state of the optimizers that were passed to ``replicate()``
        is averaged too. Residuals of gradients go on under an algorithm that has residuals in the
        same units; before another one, the next step exchanges all that was not sent, uncompressed.

        Bytes sent: 4 (n-1)/n of the model's for the average, of float64 values 2. Raises
        ``ValueError`` on all ranks, and changes nothing, if they pass different algorithms, or one
        that cannot be run here: ``torch_ddp()`` and ``adasum(partition=True)`` cannot be entered or
        left, and elastic runs of nodes cannot switch.
        """
        self._use.require_open()
        self._switch(algorithm)
        self._schedule = [*self.algorithm.phases]

    def _switch(self, algorithm: object) -> None:
        fault, switching = None, Switching(self._members, self._consensus, algorithm, self.steps)
        try:
            self._watch.require_spent("switch")
        except ValueError as error:
            fault = str(error)
        switching.agree(fault, lambda text: self._together("switch", self._members.gather(text)))
        if switching.algorithm == self.algorithm:
            return
        self._note(switching.note)
        self._together("switch", switching.make)
        self._take_slots()
        self._watch.hook()
        self.is_averaged |= switching.has_averaged
        self._recorder.switched(**self._named_algorithm)

    def _go_on(self) -> None:
        """Begin the next phase of a schedule, if this one has ended."""
        if (following := self.algorithm.following(self.steps)) is not None:
            self._switch(following)
        elif self.algorithm.auto is not None and self._autopilot.is_due(self.steps):
            self._switch(self._choose())

    @cached_property
    def _autopilot(self) -> "Autopilot":
        """Made by ``auto()`` only: importing it takes as long as all of offbeat."""
        from offbeat.replica.autopilot import Autopilot

        return Autopilot(self._members, self._recorder)

    def _choose(self) -> Algorithm:
        """Measure, and let the first rank decide for all; all ranks call."""
        figures = json.dumps(self._together("auto", self._autopilot.measure))
        said = [json.loads(text) for text in self.gather(figures)]
        is_first = self.world.rank == self.world.ranks[0]
        decision = self._autopilot.choose(said, self.steps) if is_first else None
        return self._autopilot.adopt(json.loads(self.gather(json.dumps(decision))[0]))

    @contextmanager
    def _in_phase_of(self, saved: object) -> Iterator[None]:
        """Switch to the phase of a schedule in which a state was saved; back if it is unfit."""
        before = self.algorithm
        if len(self._schedule) > 1 or before.auto is not None:
            named = {*self.gather(checkpoint.algorithm_of(saved, self.world))}
            phases = [each for each in self._schedule if {repr(each)} == named]
            if not phases and len(named) == 1:
                with suppress(ValueError):  # residuals are being sent, or auto() has chosen
                    sending = compose(named.pop())
                    phases = [sending for each in self._schedule if sending.leads_to(each)]
            if phases:
                self._switch(phases[0])
        try:
            yield
        except ValueError:
            if self.algorithm != before:
                self._switch(before)
            raise

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm at present."""
        return self._members.algorithm

    @property
    def _named_algorithm(self) -> dict[str, str]:
        return {"algorithm": str(self.algorithm), "exchanges": repr(self.algorithm)}

    @property
    def _exchanging(self) -> tuple[Any, ...]:
        """What :class:`GradientExchange` exchanges by."""
        members = self._members
        transact = partial(self._together, None) if members.exchanges_again else None
        return members.gradients, members.heartbeat, members.buffers, transact

    def _take_slots(self) -> None:
        self.gradients, self.parameters = self._members.gradients, self._members.parameters
        self._watch.exchange.replace(*self._exchanging)

    def _adopt(self, texts: Sequence[str]) -> None:
        """Go on with the ranks that take part now; ``texts`` say who was lost or has joined."""
        self._connection = self._members.connection
        self._take_slots()
        self._watch.is_first = False  # others may be past their first step
        for text in texts:
            warnings.warn(text, RuntimeWarning, stacklevel=7)

    def _note(self, note: str | None) -> None:
        if note is not None and note not in self.notes:
            self.notes.append(note)
            warnings.warn(f"rank {self.world.rank}: {note}", RuntimeWarning, stacklevel=4)
