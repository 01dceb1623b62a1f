"""One row for each worker: which rows exchange, and which columns are a layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Rows:
    """Describes a tensor (n, d) with the parameters of n workers.

    Attributes:
        nodes: the workers of each node.
        layers: the columns of each parameter tensor, by name.
    """

    nodes: Groups
    layers: Mapping[str, slice]

    @cached_property
    def workers(self) -> list[int]:
        """All workers in order."""
        return sorted(worker for node in self.nodes for worker in node)

    def participants(self, over: Literal["world", "node"]) -> Groups:
        """Return the workers of each participant: of each node, or each worker by itself."""
        return self.nodes if over == "node" else [[worker] for worker in self.workers]


def first_of(x: Tensor, groups: Groups) -> Tensor:
    """Return a copy of one row of each group (groups, d): all rows of a group are equal."""
    return x[[group[0] for group in groups]]


def mean_of(x: Tensor, groups: Groups) -> Tensor:
    """Return the mean row of each group (groups, d).

    >>> mean_of(torch.tensor([[0.0], [2.0], [5.0]]), [[0, 1], [2]])
    tensor([[1.],
            [5.]])
    """
    sizes = torch.tensor([len(group) for group in groups], dtype=x.dtype, device=x.device)
    sums = x.new_zeros(len(groups), x.shape[1])
    members = [worker for group in groups for worker in group]
    owners = torch.arange(len(groups), device=x.device).repeat_interleave(sizes.long())
    return sums.index_add_(0, owners, x[members]).div_(sizes.unsqueeze(1))


def spread(rows: Tensor, groups: Groups, x: Tensor) -> None:
    """Give every worker of ``x`` (n, d) the row of its group."""
    owners = [owner for owner, group in enumerate(groups) for _ in group]
    x[[worker for group in groups for worker in group]] = rows[owners]
