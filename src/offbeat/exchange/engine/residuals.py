"""Settings of exchanges with residuals, which a world of another size takes over."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from offbeat.exchange import GradientExchange, Saved


class FeedbackExchange(GradientExchange):
    """An exchange whose ranks each save residuals and velocities, by parameter."""

    takes_weights: ClassVar[bool] = True

    @property
    def takes_shards(self) -> bool:
        """Whether it exchanges between nodes: FSDP2 has averaged inside them, all entries."""
        return self.over == "world"

    def inherit(self, saved: Mapping[int, Saved], before: int, rank: int, size: int) -> Saved:
        r"""Keep the mean of residuals and velocities in a world of another size.

        .. math:: \frac{1}{P'} \sum_{r'} \epsilon_{r'} = \frac{1}{P} \sum_r \epsilon_r

        Means of neighbouring ranks' residuals where the world shrinks by a whole factor, copies
        where it grows by one, the mean of all for each rank otherwise.
        """
        heirs = _heirs(before, rank, size)
        if lost := [r for r in heirs if r not in saved]:
            raise ValueError(
                f"the residuals of ranks {lost} are missing; every rank saves its own, and rank "
                f"{rank} of {size} needs those of ranks {heirs} of {before} (of nodes, if the "
                "model is sharded): pass them together, {**one, **another}"
            )
        merged = dict(saved[heirs[0]])
        for kind in {"residual", "velocity"} & merged.keys() if len(heirs) > 1 else ():
            merged[kind] = {
                name: torch.stack([saved[r][kind][name] for r in heirs]).mean(0)
                for name in merged[kind]
            }
        return merged


def _heirs(before: int, rank: int, size: int) -> list[int]:
    """Return the ranks of the old world whose mean residual ``rank`` of the new one takes."""
    if before % size == 0:
        share = before // size
        return list(range(rank * share, (rank + 1) * share))
    return [rank % before] if size % before == 0 else list(range(before))
