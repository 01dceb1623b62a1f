"""The agreement of all ranks on another algorithm, and what becomes of models and residuals."""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, final

from torch import Tensor

from offbeat.attach.checks import optimizer_fault, shards_fault
from offbeat.attach.first_step import keeps_equal
from offbeat.attach.start import elastic_fault, weights_fault
from offbeat.elastic.generation import Generation
from offbeat.elastic.node import takes_part_as_nodes
from offbeat.elastic.switching import switch
from offbeat.exchange import Algorithm
from offbeat.exchange.engine.error_feedback import ErrorFeedback
from offbeat.exchange.engine.residuals import FeedbackExchange
from offbeat.exchange.sharding import local
from offbeat.methods import TopK
from offbeat.recipes import algorithm as parsed
from offbeat.replica.consensus import Consensus, average_buffers

PATIENCE = 10  # steps in which residuals are sent before those that are left are dropped
_ALIKE = "the steps made", "the algorithm", "its settings", "the optimizer's state"


@final
class Switching:
    """A switch after ``steps`` steps to ``given``, an algorithm or its text.

    Attributes:
        algorithm: the algorithm of the next step, once all have agreed.
        has_averaged: whether all ranks have got the average model.
    """

    def __init__(
        self, members: Generation, consensus: Consensus, given: object, steps: int
    ) -> None:
        self._members, self._consensus = members, consensus
        self._given, self._steps = given, steps
        self.algorithm, self.has_averaged = members.algorithm, False

    def agree(self, fault: str | None, ask: Callable[[str], Sequence[str]]) -> None:
        """Find the algorithm of the next step; raise ValueError on all ranks if one cannot go on.

        ``fault``: why this rank cannot; ``ask`` returns what all ranks pass.
        """
        target = self.algorithm
        try:
            target = _read(self._given)
            fault = fault or switch_fault(self._members, target)
        except ValueError as error:
            fault = fault or str(error)
        word = self._about(target) if fault is None else dict[str, object](fault=fault)
        word["rank"] = self._members.world.rank  # others may be lost during the call
        first, *others = said = [json.loads(text) for text in ask(json.dumps(word))]
        for each in said:
            if "fault" in each:
                raise ValueError(f"switch() on rank {each['rank']}: {each['fault']}")
        for other, what in product(others, _ALIKE):
            if (here := first[what]) != (there := other[what]):
                raise ValueError(
                    f"switch() on ranks {first['rank']} and {other['rank']}: {what}: {here} here "
                    f"and {there} there; make the same calls with the same algorithm on all ranks"
                )
        self.algorithm = self._way_to(target, any(other["unsent"] for other in said))

    def make(self) -> None:
        """Replace the slots; all ranks call, and again after a loss."""
        switch(self._members, self.algorithm, self._leave)

    @property
    def note(self) -> str | None:
        """A warning where optimizers will drive equal models apart."""
        if not self._equalizes(self.algorithm) or self._members.filler.optimizers:
            return None
        return (
            f"switch() to {self.algorithm}, which keeps models equal, without an optimizer= of "
            "replicate(): if it has momentum or other state, ranks drift apart; pass it"
        )

    def _about(self, target: Algorithm) -> dict[str, object]:
        model, slot = self._members.filler.model, self._members.gradients
        settings = {} if target.gradients is None else target.gradients.resolved(model.trained)
        state = [[*tensor.shape] for tensor in self._optimizer_state(target)]
        return {
            "the steps made": self._steps,
            "the algorithm": repr(target),
            "its settings": zlib.crc32(json.dumps(dict(settings)).encode()),
            "the optimizer's state": zlib.crc32(json.dumps(state).encode()),
            "unsent": isinstance(slot, ErrorFeedback) and slot.has_residuals,
        }

    def _way_to(self, target: Algorithm, has_unsent: bool) -> Algorithm:
        """Return ``target``, or what exchanges in its place until residuals are sent."""
        now, end = self._members.algorithm, self._steps + 1
        near = now.gradients
        if near is None or not has_unsent or _goes_on(near, target.gradients):
            return target
        if now.then == target and isinstance(near, TopK) and near.density == 1:
            return now if self._steps < now.end + PATIENCE else target
        while target.then is not None and target.end <= end:  # it will have ended by then
            target = target.then
        dense = TopK(density=1.0, over=near.over, units=_units(near))
        return Algorithm(dense, target.parameters, end=end, then=target)

    def _equalizes(self, target: Algorithm) -> bool:
        return _equal_ranks(target) > _equal_ranks(self._members.algorithm)

    def _leave(self) -> None:
        before, is_equal = self._members.algorithm, self._equalizes(self.algorithm)
        goes_on = before.parameters == self.algorithm.parameters and not is_equal
        if goes_on or keeps_equal(before):
            return
        self._consensus.reach("switch", self._steps)
        self._members.parameters.reset()
        group, site = self._members.connection.control, self._members.parameters.site
        if self._members.filler.model.is_sharded and site is not None:
            group = site.group  # of the ranks that hold the same shards
        average_buffers(self._optimizer_state(self.algorithm), group)
        self._members.settle(self._steps)
        self.has_averaged = True

    def _optimizer_state(self, target: Algorithm) -> list[Tensor]:
        """Return the tensors that must be equal on all ranks under ``target``, and are not."""
        if not self._equalizes(target):
            return []
        trained, optimizers = self._members.filler.model.trained, self._members.filler.optimizers
        states = [o.state[p] for o in optimizers for p in trained.values() if p in o.state]
        values = [value for state in states for value in state.values()]
        return [local(value) for value in values if isinstance(value, Tensor)]


def _equal_ranks(algorithm: Algorithm) -> int:
    """Return 2 if all ranks hold equal models after each step, 1 if those of a node do, or 0."""
    near, far = algorithm.gradients, algorithm.parameters
    if keeps_equal(algorithm) or near is None:
        return 2 if near is not None else 0
    return int(near.over == "local" or (far is not None and far.over == "node"))


def _read(given: object) -> Algorithm:
    if isinstance(given, str | Algorithm):
        return parsed(given)
    raise ValueError(
        f"got {given!r}, expected an algorithm such as offbeat.local_sgd(every=8), or its text"
    )


def switch_fault(members: Generation, target: Algorithm) -> str | None:
    """Return why this rank cannot switch to ``target``, or None."""
    filler, now = members.filler, members.algorithm
    exchanges = [now.gradients, target.gradients]
    if any(each is not None and each.is_wrapper for each in exchanges):
        return "torch_ddp() wraps the model for good; use ddp(), which is as fast"
    if any(each is not None and each.partition for each in exchanges):
        return "partition=True divides the layers among optimizers for good; use partition=False"
    if target.gradients is not None and filler.samples is not None and filler.samples.rests:
        return (
            f"ElasticSampler(window=...) with {target}, which exchanges gradients in each step, "
            "also in those in which a rank rests; use most= in place of window="
        )
    comes_as_node = filler.model.is_sharded or takes_part_as_nodes(target)
    if filler.is_elastic and (members.node is not None or comes_as_node):
        return f"{now} to {target}: in an elastic run of nodes the algorithm cannot change"
    following = replace(filler, algorithm=target)
    return (
        optimizer_fault(following)
        or elastic_fault(following)
        or weights_fault(following)
        or (shards_fault(following, members.world) if filler.model.is_sharded else None)
    )


def _goes_on(now: object, following: object) -> bool:
    """Whether the residuals of an exchange of gradients go on in the next one."""
    if now == following:
        return True
    if not isinstance(now, FeedbackExchange) or not isinstance(following, FeedbackExchange):
        return False
    return now.over == following.over and _units(now) == _units(following)


def _units(exchange: object) -> Literal["lr", "gradient"] | None:
    return exchange.units if isinstance(exchange, TopK) else "gradient"
