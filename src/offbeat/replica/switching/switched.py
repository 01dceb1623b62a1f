"""A replica that goes on with other algorithms: at once, by a schedule, or by its own choice."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING

from offbeat.elastic.switching import switch
from offbeat.exchange import Algorithm, Saved
from offbeat.recipes.composed import compose
from offbeat.replica.participation import Participation
from offbeat.replica.saving import checkpoint
from offbeat.replica.switching.agreement import agree, averaging_first, drift_note, make_equal
from offbeat.telemetry.recorder import Recorder

if TYPE_CHECKING:  # importing it takes as long as all of offbeat
    from offbeat.replica.switching.autopilot import Autopilot


class Switched(Participation):
    """The part of a :class:`Replica` that changes its algorithm."""

    is_averaged: bool
    _recorder: Recorder
    _schedule: Sequence[Algorithm]

    def switch(self, algorithm: str | Algorithm) -> None:
        """Go on with another algorithm, in place, from the next step on; all ranks call.

        Call it between a ``step()`` and the next backward that exchanges. An exchange that both
        algorithms have goes on undisturbed. Another one in the parameters slot begins with the
        average of all ranks, as after :meth:`finish`, unless the last step has made them equal;
        if only the new one keeps them so, the state of the optimizers that were passed to
        ``replicate()`` is averaged too. Between methods that average models over all ranks, before
        ``local_sgd()`` and before one that keeps models equal they may differ: the next exchange is
        their average, for the latter in a step of ``local_sgd(every=1)``. Residuals of gradients go
        on under an algorithm that has residuals in the same units; before another one, the next
        step exchanges all that was not sent, uncompressed.

        Bytes sent: 2 (n-1)/n of the model's for the average, 4 for bfloat16; 128 KiB to each peer
        of a gossip where ranks are far from each other, since TCP begins slowly. Raises
        ``ValueError`` on all ranks, and changes nothing, if they pass different algorithms, or one
        that cannot be run here: ``torch_ddp()`` and ``adasum(partition=True)`` cannot be entered or
        left, and elastic runs of nodes cannot switch.
        """
        self._require_open()
        self._switch(algorithm)
        self._schedule = [*self.algorithm.phases]
        self._members.planned = repr(self.algorithm)

    def _switch(self, algorithm: object, exactly: bool = False) -> None:
        """Go on with ``algorithm``; ``exactly``: with what a load writes, and nothing before it."""
        members, fault = self._members, None
        try:
            self._watch.require_spent("switch")
        except ValueError as error:
            fault = str(error)
        target, are_equal, known = agree(
            *(members, algorithm, self.steps, fault, self.is_averaged),
            lambda text: self._together("switch", members.gather(text)),
            exactly=exactly,
        )
        if not (are_equal or exactly):
            target = averaging_first(members, target, self.steps)
        if target == self.algorithm:
            return
        if target.auto not in (None, self.algorithm.auto):  # which chooses among others
            vars(self).pop("_autopilot", None)

        def leave() -> None:
            if exactly:
                return
            found = members, self._consensus, target, self.steps, are_equal, known
            self.is_averaged |= make_equal(*found)

        self._note(None if exactly else drift_note(members, target))
        is_far = known is not None and known.is_far
        with self._consensus.settling():
            self._together("switching", lambda: switch(members, target, leave, is_far))
        self._take_slots()
        self._watch.hook()
        self._recorder.switched(**self._named_algorithm)

    def _go_on(self) -> None:
        """Begin the next phase of a schedule, if this one has ended."""
        is_due = self.algorithm.auto is not None and self._autopilot.is_due(self.steps)
        if (following := self.algorithm.following(self.steps)) is not None:
            self._switch(following)
        elif is_due and (self._autopilot.decides or self._waits_differently()):
            self._switch(self._choose())

    @cached_property
    def _autopilot(self) -> "Autopilot":
        """What ``auto()`` chooses by."""
        from offbeat.replica.switching.autopilot import Autopilot

        return Autopilot(self._members, self._recorder)

    def _waits_differently(self) -> bool:
        """Compare how long the ranks wait with before; all ranks call."""
        waits = self._autopilot.waits
        said = self.gather(json.dumps(waits.said()))
        self._recorder.count_choice()  # it is no wait of the next step
        return waits.have_changed([json.loads(each) for each in said], self.steps)

    def _choose(self) -> Algorithm:
        """Measure, and let the first rank decide for all; all ranks call."""
        figures = json.dumps(self._together("auto", self._autopilot.measure))
        said, told = [json.loads(text) for text in self.gather(figures)], None
        while told is None:  # the first rank may be lost before it tells the others
            is_first = self.world.rank == self.world.ranks[0]
            decision = self._autopilot.choose(said, self.steps) if is_first else None
            told = json.loads(self.gather(json.dumps(decision))[0])
        return self._autopilot.adopt(told)

    @contextmanager
    def _in_phase_of(self, saved: object, stays: bool) -> Iterator[None]:
        """Switch to the phase of a schedule in which a state was saved; back if it is unfit.

        ``stays``: not back if it is fit.
        """
        before, members = self.algorithm, self._members
        count, slots = len(members.switches), list[Saved]()
        if len(self._schedule) > 1 or before.auto is not None:
            named = {*self.gather(checkpoint.algorithm_of(saved, self.world))}
            phases = [each for each in self._schedule if {repr(each)} == named]
            if not phases and len(named) == 1:
                with suppress(ValueError):  # a step before a phase, or auto() has chosen
                    leading = compose(named.pop())
                    phases = [leading for each in self._schedule if leading.leads_to(each)]
            if phases and phases[0] != before:
                # Also waits for what is in flight, over groups that others will use.
                slots = self._transact(
                    lambda: [s.save() for s in (self.gradients, self.parameters)]
                )
                self._switch(phases[0], exactly=True)

        def go_back() -> None:
            if slots:
                self._switch(before, exactly=True)
                for slot, state in zip((self.gradients, self.parameters), slots, strict=True):
                    slot.load(state)
                del members.switches[count:]

        try:
            yield
        except ValueError:
            go_back()
            raise
        if not stays:
            go_back()
