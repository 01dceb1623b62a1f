"""Taking evaluations out of recorded steps: what a step costs must not depend on them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from offbeat.compare.record import Step


def without_evaluations(steps: Sequence[Step]) -> list[Step]:
    """One rank's steps with seconds, stalls and bytes of training alone.

    A step is recorded from the end of the last one, so that it contains an evaluation made
    between the two, and what :meth:`offbeat.Replica.consensus` sent for it. An evaluation comes
    before the forward pass: beyond a usual forward pass, time up to the first gradient is its
    own, and so are the stalls in there. What it sent is seen by comparing: the least that a step
    with an evaluation sends, less the least that one without sends. Only evaluations that
    reported a held-out loss can be seen.
    """
    plain = [step for step in steps if not step.after_evaluation]
    after = [step for step in steps if step.after_evaluation]
    if not plain or not after:
        return list(steps)
    usual = median(_forward(step) for step in plain)
    sent = _extra_bytes(plain, after)
    return [_trimmed(step, usual, sent) if step.after_evaluation else step for step in steps]


def _trimmed(step: Step, usual: float, sent: Mapping[str, float]) -> Step:
    forward = _forward(step)
    stalled = sum(end - start for start, end in step.between("stall") if end <= forward)
    return replace(
        step,
        seconds=step.seconds - max(0.0, forward - usual),
        seconds_stalled=max(0.0, step.seconds_stalled - stalled),
        bytes_sent={axis: count - sent.get(axis, 0) for axis, count in step.bytes_sent.items()},
    )


def _forward(step: Step) -> float:
    return max((end for _, end in step.between("forward")), default=0.0)


def _extra_bytes(plain: Sequence[Step], after: Sequence[Step]) -> dict[str, float]:
    axes = {axis for step in after for axis in step.bytes_sent}
    return {axis: max(0.0, _least(after, axis) - _least(plain, axis)) for axis in axes}


def _least(steps: Sequence[Step], axis: str) -> float:
    return min(step.bytes_sent.get(axis, 0) for step in steps)
