"""The agreement of all ranks on another algorithm, and what becomes of models and residuals."""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from offbeat.attach.checks import shards_fault
from offbeat.attach.first_step import keeps_equal
from offbeat.attach.start import algorithm_fault
from offbeat.elastic.generation import Generation
from offbeat.elastic.node import takes_part_as_nodes
from offbeat.exchange import Algorithm
from offbeat.exchange.engine.error_feedback import ErrorFeedback, FeedbackExchange
from offbeat.exchange.sharding import local
from offbeat.methods import Average, OuterStep, PairAverage, PushSum, TopK
from offbeat.platform.round_trip import FAR, round_trip
from offbeat.recipes import algorithm as parsed
from offbeat.replica.consensus import Compared, Consensus, average_buffers, kinds_of_buffers
from offbeat.transport.small_gathers import gather_numbers

PATIENCE = 10  # steps in which residuals are sent before those that are left are dropped
LEAST = 1e-9  # by which weights differ that do not only round differently
_MEANS = Average | OuterStep | PushSum | PairAverage  # their average is that of the models
_ALIKE = "the steps made", "the algorithm", "its settings", "the optimizer's state"


def agree(
    members: Generation,
    given: object,
    steps: int,
    fault: str | None,
    is_averaged: bool,
    ask: Callable[[str], Sequence[str]],
    *,
    exactly: bool = False,
) -> tuple[Algorithm, bool, Compared | None]:
    """Return the algorithm of the next step, whether models are equal, and what ranks know.

    The last, what they have just compared, is None if their buffers are not alike.

    Raises ValueError on all ranks if one cannot go on. ``given``: an algorithm or its text.
    ``fault``: why this rank cannot go on. ``is_averaged``: whether models were set to one since the
    last step. ``ask`` returns what all ranks pass. ``exactly``: residuals are not sent first. Ranks
    that agree ask once, in few bytes; others, to say how they differ, twice.
    """
    # Its own number: others may be lost during the call.
    target, rank = members.algorithm, members.world.rank
    try:
        target = _read(given)
        fault = fault or switch_fault(members, target)
    except ValueError as error:
        fault = fault or str(error)
    word = _about(members, target, steps) if fault is None else dict[str, object](fault=fault)
    digest = zlib.crc32(json.dumps(word).encode())
    model = members.filler.model
    buffers = zlib.crc32(kinds_of_buffers(model).encode())
    # A rank that was brought up to date after a loss has made no average itself.
    are_equal = is_averaged or _have_met(members, steps)
    flags = [fault is not None, _has_unsent(members), round_trip() >= FAR, are_equal]
    briefly = ask(f"{digest:08x}{''.join('01'[flag] for flag in flags)}{buffers:08x}")
    if len({brief[:8] for brief in briefly}) > 1 or any(brief[8] == "1" for brief in briefly):
        _raise_difference([json.loads(text) for text in ask(json.dumps(word | {"rank": rank}))])
    has_unsent = any(brief[9] == "1" for brief in briefly)
    are_equal = all(brief[11] == "1" for brief in briefly)
    if has_unsent and not exactly:
        target = _way_to(target, members.algorithm, steps)
    known = Compared(model.buffers, is_far=any(brief[10] == "1" for brief in briefly))
    is_alike = len({brief[12:] for brief in briefly}) == 1
    return target, are_equal, known if is_alike else None


def _raise_difference(said: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError with the first fault, or the first difference to what rank 0 has said."""
    first, *others = said
    for each in said:
        if "fault" in each:
            raise ValueError(f"switch() on rank {each['rank']}: {each['fault']}")
    for other, what in product(others, _ALIKE):
        if (here := first[what]) != (there := other[what]):
            raise ValueError(
                f"switch() on ranks {first['rank']} and {other['rank']}: {what}: {here} here "
                f"and {there} there; make the same calls with the same algorithm on all ranks"
            )


def make_equal(
    members: Generation,
    consensus: Consensus,
    target: Algorithm,
    steps: int,
    are_equal: bool,
    known: Compared | None,
) -> bool:
    """Average models before ``target``, if it needs that; return whether it does. All ranks call.

    Also the state of optimizers, where ``target`` keeps it equal and the algorithm before does not.
    ``are_equal``, ``known``: what :func:`agree` has found.
    """
    before, equalizes = members.algorithm, _equalizes(members, target)
    goes_on = before.parameters == target.parameters and not equalizes
    if goes_on or keeps_equal(before):
        return False
    if not are_equal and _may_differ(members, target) and _drained(members):
        return False
    state = [*map(local, _optimizer_state(members, target))]
    also = {f"state {number}": tensor for number, tensor in enumerate(state)}
    known = consensus.set("switch", steps, also, exact=False, known=known, are_equal=are_equal)
    members.parameters.reset()
    group, site = members.connection.control, members.parameters.site
    if members.filler.model.is_sharded and site is not None:
        group = site.group  # of the ranks that hold the same shards
    average_buffers(state, group, is_far=known.is_far)
    members.settle(steps)
    return True


def drift_note(members: Generation, target: Algorithm) -> str | None:
    """Return a warning where optimizers will drive equal models apart under ``target``."""
    if not _equalizes(members, target) or members.filler.optimizers:
        return None
    return (
        f"switch() to {target}, which keeps models equal, without an optimizer= of replicate(): "
        "if it has momentum or other state, ranks drift apart; pass it"
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
    return algorithm_fault(following) or (
        shards_fault(following, members.world) if filler.model.is_sharded else None
    )


def _read(given: object) -> Algorithm:
    if isinstance(given, str | Algorithm):
        return parsed(given)
    raise ValueError(
        f"got {given!r}, expected an algorithm such as offbeat.local_sgd(every=8), or its text"
    )


def _about(members: Generation, target: Algorithm, steps: int) -> dict[str, object]:
    model = members.filler.model
    settings = {} if target.gradients is None else target.gradients.resolved(model.trained)
    # Of a sharded model those of all shards together: the parts of ranks may differ in size.
    state = [[*tensor.shape] for tensor in _optimizer_state(members, target)]
    return {
        "the steps made": steps,
        "the algorithm": repr(target),
        "its settings": zlib.crc32(json.dumps(dict(settings)).encode()),
        "the optimizer's state": zlib.crc32(json.dumps(state).encode()),
    }


def _has_unsent(members: Generation) -> bool:
    slot = members.gradients
    return isinstance(slot, ErrorFeedback) and slot.has_residuals


def _have_met(members: Generation, steps: int) -> bool:
    """Whether the last step has set the models of all ranks to one."""
    now, slot = members.algorithm, members.parameters
    sets_all = now.parameters is not None and (
        now.parameters.over == "world" or _equal_ranks(now) > 0
    )
    return sets_all and slot.are_equal(steps)


def _may_differ(members: Generation, target: Algorithm) -> bool:
    """Whether ranks may begin ``target`` with models that differ: its next exchange is their mean.

    An average at once takes as long as several steps where latency or the rate is low.
    """
    now, following = members.algorithm.parameters, target.parameters
    site, is_alone = members.parameters.site, target.gradients is None
    return (
        (isinstance(following, Average) and following.over == "world" and is_alone)
        and following.nonfinite == "raise"  # or a rank would go back to models that nobody checked
        and (isinstance(now, _MEANS) and now.over == "world")  # others merge updates in their way
        and (site is not None and site.weights is None)
    )


def _drained(members: Generation) -> bool:
    """Merge what is in flight into the models; return whether their plain mean is the average.

    Those of push-sum must be finite and have the weight 1: a plain mean counts all of them alike.
    """
    weight, held = members.parameters.drain(), members.parameters.site.parameters.values()
    if not isinstance(members.algorithm.parameters, PushSum):
        return True
    if not all(torch.isfinite(tensor).all() for tensor in held):
        weight = float("nan")
    rows = gather_numbers([weight], members.connection.control)
    return all(abs(other - 1) < LEAST for (other,) in rows)


def _way_to(target: Algorithm, now: Algorithm, steps: int) -> Algorithm:
    """Return ``target``, or what exchanges in its place until residuals are sent."""
    near = now.gradients
    if near is None or _goes_on(near, target.gradients):
        return target
    if now.then == target and isinstance(near, TopK) and near.density == 1:
        return now if steps < now.end + PATIENCE else target
    dense = TopK(density=1.0, over=near.over, units=_units(near))
    return _before(target, Algorithm(dense, target.parameters), steps)


def _before(target: Algorithm, first: Algorithm, steps: int) -> Algorithm:
    """Return ``first`` for the step after ``steps``, and then what ``target`` is by then."""
    while target.then is not None and target.end <= steps + 1:
        target = target.then
    way = first.until(steps + 1, target)
    return way if target.auto is None else way.chosen_by(target.auto)


def averaging_first(members: Generation, target: Algorithm, steps: int) -> Algorithm:
    """Return ``target``, or a step whose exchange is the average of models that differ before it.

    In place of an average and the first exchange of ``target``, which cost as much each.
    """
    first = _before(target, parsed("local_sgd(every=1)"), steps)
    is_alone = members.algorithm.gradients is None  # or residuals would wait
    is_way = keeps_equal(target) and is_alone and _may_differ(members, first)
    return first if is_way else target


def _goes_on(now: object, following: object) -> bool:
    """Whether the residuals of an exchange of gradients go on in the next one."""
    if now == following:
        return True
    if not isinstance(now, FeedbackExchange) or not isinstance(following, FeedbackExchange):
        return False
    return now.over == following.over and _units(now) == _units(following)


def _units(exchange: object) -> Literal["lr", "gradient"] | None:
    return exchange.units if isinstance(exchange, TopK) else "gradient"


def _equalizes(members: Generation, target: Algorithm) -> bool:
    return _equal_ranks(target) > _equal_ranks(members.algorithm)


def _equal_ranks(algorithm: Algorithm) -> int:
    """Return 2 if all ranks hold equal models after each step, 1 if those of a node do, or 0."""
    near, far = algorithm.gradients, algorithm.parameters
    if keeps_equal(algorithm) or near is None:
        return 2 if near is not None else 0
    return int(near.over == "local" or (far is not None and far.over == "node"))


def _optimizer_state(members: Generation, target: Algorithm) -> list[Tensor]:
    """Return the tensors that must be equal on all ranks under ``target``, and are not."""
    if not _equalizes(members, target):
        return []
    trained, optimizers = members.filler.model.trained, members.filler.optimizers
    states = [o.state[p] for o in optimizers for p in trained.values() if p in o.state]
    values = [value for state in states for value in state.values()]
    return [value for value in values if isinstance(value, Tensor)]
