"""What the steps of a rank stand for, also where they stand for nothing."""

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from offbeat.elastic.generation import Generation
from offbeat.exchange import IdleParameters
from offbeat.exchange.samples import ALL_ZERO, MOST, Samples
from offbeat.functional import pack
from offbeat.replica.uneven import Place
from offbeat.transport.small_gathers import gather_numbers


@final
class Weighting:
    """Sets how many samples the steps of this rank stand for; undoes those that stand for none."""

    def __init__(self, members: Generation) -> None:
        """Begin with equal weights."""
        self._samples, self._members = members.filler.samples, members
        self._held = members.filler.trained
        self._kept: list[Tensor] = []  # parameters before a step that stands for nothing
        self._rests: Callable[[int], bool] | None = None
        self.is_resting = False  # whether the next step is one in which nothing is computed
        self._is_settled = False  # whether weights are given or not, on all ranks alike

    def set(self, samples: float) -> None:
        """Set the weight of the coming steps; raise ``ValueError`` on all ranks if it is none."""
        fault = None
        try:
            number = float(samples)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number <= MOST:
            fault = (
                f"set_weight() got {samples!r}, expected how many samples a step of this rank "
                "stands for: a number from 0 to 2^53"
            )
        elif not self._agrees:
            fault = (
                f"set_weight() with {self._members.algorithm}, whose steps wait for nobody to "
                "agree; use another recipe, or replica.uneven() alone"
            )
        elif self._is_settled and self._required.given is None:
            fault = (
                "set_weight() was called first after a step without weights; call it before the "
                "first step, on all ranks"
            )
        if fault is not None:
            raise self._error(fault)
        self._required.given = number
        self._keep()

    def place(self, steps: int) -> Place:
        """Return where this rank is after ``steps``, for :class:`Uneven`."""
        members = self._members
        changes = len(members.lost) + len(members.joined)
        return Place(steps, members.world.ranks, changes, members.exchanges_from)

    def run_out(self, is_out: bool) -> None:
        """Note whether this rank is out of data: its steps stand for nothing."""
        self._required.is_out = is_out
        self._keep()

    def settle(self) -> None:
        """Raise ``ValueError`` on all ranks if only some have given weights, or all give 0."""
        control = self._members.connection.control
        if self._samples is None or control is None or not self._agrees:
            return
        given, now = self._samples.given is not None, self._samples.now
        rows = gather_numbers([given, now, self._samples.is_out], control)
        silent = [rank for rank, row in zip(control.ranks, rows, strict=True) if not row[0]]
        if silent and len(silent) < len(rows):
            raise ValueError(
                f"rank {silent[0]} has not called set_weight(), and others have; call it before "
                "the first step on all ranks, or on none"
            )
        if not any(weight or is_out for _, weight, is_out in rows):
            raise ValueError(ALL_ZERO)
        self._is_settled = True

    def begin_step(self) -> None:
        """Count the samples of a step, or undo it if it stands for none."""
        if self._samples is None:
            return
        self._samples.total += self._samples.now
        # Then whatever the optimizer did counts for nothing in the next exchange.
        if self._kept and not self._is_moved:
            pack(self._held, self._kept)

    def end_step(self) -> None:
        """Keep the parameters, if the next step stands for nothing."""
        if self._samples is not None:
            self._keep()

    def follow(self, rests: Callable[[int], bool]) -> None:
        """Let this rank make steps without computing where ``rests``; on all ranks.

        Each with its own, which all call after each step, with the number of steps that are done.
        """
        self._rests, self._required.rests = rests, True

    def go_on(self, steps: int) -> None:
        """Note whether this rank rests in the next step, when ``steps`` steps are done."""
        if self._rests is not None:
            self._required.is_out = self.is_resting = self._rests(steps)

    @property
    def now(self) -> float | None:
        """What the step at hand stands for; None in a run without weights."""
        return None if self._samples is None else self._samples.now

    @property
    def _agrees(self) -> bool:
        slot = self._members.algorithm.parameters
        return slot is None or slot.waits

    @property
    def _required(self) -> Samples:
        if self._samples is None:
            why = "need replicate(..., weighted=True), on all ranks"
            if self._members.filler.model.is_sharded:
                why = "and uneven() are not there for a sharded model; give ranks equal batches"
            raise self._error(f"weights {why}")
        return self._samples

    @property
    def _is_moved(self) -> bool:
        """Whether the other ranks of the node have moved this one, by their gradients."""
        site = self._members.gradients.site
        return site is not None and site.weights is not None and any(site.weights.factors)

    def _keep(self) -> None:
        if self._required.now or isinstance(self._members.parameters, IdleParameters):
            self._kept = []
        elif self._kept:
            pack(self._kept, self._held)
        else:
            with torch.no_grad():
                self._kept = [parameter.detach().clone() for parameter in self._held]

    def _error(self, fault: str) -> Exception:
        return self._members.report_error(ValueError(f"rank {self._members.world.rank}: {fault}"))
