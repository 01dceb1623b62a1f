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


def require_due(batches: Sequence[Batch], step: int, steps: int, layout: Layout) -> None:
    """Raise ``ValueError`` for batches of a step that the replica has made without them."""
    if batches and step < steps:
        raise ValueError(
            f"the loader draws a batch of step {step} when the replica has made {steps} steps, so "
            "that some samples would be skipped; call replica.step() once after each "
            f"{layout.accumulate} batches, and begin a new loop over the loader after other steps"
        )
