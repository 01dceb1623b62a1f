"""Small problems whose gradients are known in closed form, for torch and for numpy."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from reference.participants import Array

DEVICE = "cpu"  # where models are made; tests of other devices replace it
RANKS, DIMENSION = 8, 9
_random = np.random.default_rng(0)
OPTIMA: Array = _random.normal(size=(RANKS, DIMENSION))
CURVATURES: Array = _random.uniform(0.5, 1.5, size=(RANKS, DIMENSION))
START: Array = _random.normal(size=DIMENSION)


Made = TypeVar("Made")
_SEEDING = threading.Lock()


def seeded(seed: int, make: Callable[[], Made]) -> Made:
    """Return what ``make`` draws from torch's generator, which ranks that are threads share."""
    with _SEEDING:
        torch.manual_seed(seed)
        return make()


class Quadratic(nn.Module):
    """``0.5 sum c_r (x - o_r)^2`` with an optimum and a curvature for each rank.

    Two parameters of different shape and one that is frozen, so that layouts matter.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float64, vector: torch.dtype | None = None
    ) -> None:
        super().__init__()
        start = torch.tensor(START, dtype=dtype, device=DEVICE)
        self.matrix = nn.Parameter(start[:6].view(2, 3).clone())
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype, device=DEVICE), requires_grad=False)
        self.vector = nn.Parameter(start[6:].to(vector or dtype, copy=True))
        self.register_buffer("mean", torch.zeros(2, dtype=dtype, device=DEVICE))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=DEVICE))

    def forward(self, rank: int) -> Tensor:
        x = torch.cat([self.matrix.view(-1), self.vector])
        curvature = torch.tensor(CURVATURES[rank], dtype=x.dtype, device=x.device)
        place = torch.tensor(OPTIMA[rank], dtype=x.dtype, device=x.device)
        return 0.5 * (curvature * (x - place) ** 2).sum()


ROWS = 3  # of the table, each of 2 entries


class Lookup(nn.Module):
    """The same parameters, the first an embedding: ``0.5 sum (row - o_r)^2`` over what is read."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, sparse: bool = True) -> None:
        super().__init__()
        start = torch.tensor(START, dtype=dtype, device=DEVICE)
        self.matrix = nn.Embedding(ROWS, 2, sparse=sparse, _weight=start[:6].view(ROWS, 2).clone())
        self.vector = nn.ParameterList([start[6:].clone()])

    def forward(self, rows: list[int], rank: int) -> Tensor:
        place = torch.tensor(OPTIMA[rank], dtype=self.vector[0].dtype, device=DEVICE)
        index = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        missed = self.matrix(index) - place[:6].view(ROWS, 2)[index]
        return 0.5 * (missed.square().sum() + (self.vector[0] - place[6:]).square().sum())


def rows_of(rank: int, step: int) -> list[int]:
    """What a rank reads in a step: a row, or one twice and another; in some steps nothing."""
    return [[], [0], [1, 2, 1], [2], [0, 1]][(rank + 2 * step) % 5]


def lookup_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """What :func:`offbeat.testing.simulate` asks for."""
    result: Tensor = model(rows_of(rank, step), rank)
    return result


def lookup_gradient(rank: int, z: Array, step: int) -> Array:
    """The same gradient for the references."""
    result: Array = z - OPTIMA[rank]
    result[:6].reshape(ROWS, 2)[...] *= np.bincount(rows_of(rank, step), minlength=ROWS)[:, None]
    return result


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """What :func:`offbeat.testing.simulate` asks for."""
    result: Tensor = model(rank)
    return result


def gradient(rank: int, z: Array, step: int) -> Array:
    """The same gradient for the references."""
    result: Array = CURVATURES[rank] * (z - OPTIMA[rank])
    return result


class ScheduleFree(torch.optim.SGD):
    """Evaluates other parameters than it trains, here twice them, and notes which the model has."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["train_mode"] = True

    def eval(self) -> None:
        """Show what is evaluated."""
        self._switch(False, 2.0)

    def train(self) -> None:
        """Show what is trained."""
        self._switch(True, 0.5)

    def _switch(self, mode: bool, factor: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                group["train_mode"] = mode
                for parameter in group["params"]:
                    parameter.data.mul_(factor)


def flat(snapshot: dict[str, Tensor]) -> Array:
    """A snapshot of the trainable parameters as one vector."""
    names = sorted(name for name in snapshot if name.split(".")[0] in ("matrix", "vector"))
    parts = [snapshot[name].reshape(-1).double().cpu().numpy() for name in names]
    return np.concatenate(parts)


def optimum(ranks: int) -> Array:
    """Where the sum of the first ``ranks`` losses is smallest."""
    result: Array = (CURVATURES * OPTIMA)[:ranks].sum(0) / CURVATURES[:ranks].sum(0)
    return result
