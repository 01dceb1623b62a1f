"""Errors of loops whose loader and replica are not in step."""

from collections.abc import Sequence

from offbeat.data.generation import Batch, Layout


def require_near(step: int, steps: int, layout: Layout) -> None:
    """Raise ``ValueError`` if a loader is further ahead than it may be after ``steps`` steps."""
    if step > steps + layout.lookahead:
        raise ValueError(
            f"the loader draws a batch of step {step} when the replica has made {steps} steps; "
            f"call replica.step() after each {layout.accumulate} batches, or pass "
            f"prefetch={(step - steps) * layout.accumulate} or more, "
            "num_workers * prefetch_factor"
        )


def require_due(due: int | None, step: int) -> None:
    """Raise ``ValueError`` if batches of steps from ``due`` to ``step`` would be skipped."""
    if due is not None and due < step:
        raise ValueError(
            f"the epoch goes on with the batch of step {due}, but the replica has made {step} "
            "steps: some had no batch of this sampler, and their samples would be skipped; call "
            "set_epoch() right before the loop, and one sampler for all steps of an epoch"
        )


def require_not_made(batches: Sequence[Batch], step: int, steps: int, layout: Layout) -> None:
    """Raise ``ValueError`` for batches of a step that the replica has made without them."""
    if batches and step < steps:
        raise ValueError(
            f"the loader draws a batch of step {step} when the replica has made {steps} steps, so "
            "that a run that resumes would skip samples; call replica.step() once after each "
            f"{layout.accumulate} batches, and use one sampler for all steps of an epoch"
        )
