"""Residuals in a world of another size."""

from collections.abc import Collection, Mapping

import torch

from offbeat.exchange import Saved


def inherit_means(
    saved: Mapping[int, Saved], before: int, rank: int, size: int, kinds: Collection[str]
) -> Saved:
    r"""Keep the mean of the residuals in a world of another size.

    .. math:: \frac{1}{P'} \sum_{r'} \epsilon_{r'} = \frac{1}{P} \sum_r \epsilon_r

    Means of neighbouring ranks' residuals where the world shrinks by a whole factor, copies
    where it grows by one, the mean of all for each rank otherwise.

    Args:
        saved: what the ranks of the old world have saved.
        before: the size of the old world.
        rank: this rank in the new world.
        size: the size of the new world.
        kinds: the entries of ``saved`` that hold residuals, by parameter.

    >>> old = {rank: {"residual": {"w": torch.tensor([float(rank)])}} for rank in range(4)}
    >>> inherit_means(old, 4, 1, 2, ["residual"])
    {'residual': {'w': tensor([2.5000])}}
    """
    heirs = _heirs(before, rank, size)
    lost = [r for r in heirs if r not in saved]
    if lost:
        raise ValueError(
            f"the residuals of ranks {lost} are missing; every rank saves its own, and rank "
            f"{rank} of {size} needs those of ranks {heirs} of {before} (of nodes, if the model is "
            "sharded): pass them together, {**one, **another}"
        )
    merged = dict(saved[heirs[0]])
    for kind in set(kinds) & merged.keys() if len(heirs) > 1 else ():
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
