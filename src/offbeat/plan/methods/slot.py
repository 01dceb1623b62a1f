"""What the model of an exchange of parameters offers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.exchange import ParameterExchange
from offbeat.functional import Layout, accumulation_dtype
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.transport.world import Axis

Ranks = NDArray[np.int64]
CALL = 80  # bytes of the block in which ranks compare a call, with up to four numbers


class Section(NamedTuple):
    """A part of the model of one dtype, as far as one rank exchanges it."""

    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The bytes of the section."""
        return self.numel * self.itemsize


class StepTimes(ABC):
    """Models what happens after the optimizer's step.

    Attributes:
        memory: what the exchange allocates on each rank, in bytes.
        period: the number of steps after which exchanges repeat.
        lead: steps before the first period.
        is_whole_run: whether a period is a run from its first to its last step.
    """

    memory: float = 0.0
    period: int = 1
    lead: int = 0
    is_whole_run: bool = False

    def restart(self) -> None:  # noqa: B027  # most exchanges have nothing in flight
        """Begin another run, with nothing in flight; nothing to do unless overridden."""

    @abstractmethod
    def step(self, clocks: Clocks, step: int) -> None:
        """Move the clocks through the exchange that follows ``step`` earlier ones, if any."""


def slices_on(fabric: Fabric, exchange: ParameterExchange) -> int:
    """Return into how many slices the ranks of a node divide the model."""
    return fabric.ranks_per_node if exchange.over == "node" else 1


def sections(
    tensors: Mapping[str, Tensor], slices: int = 1, *, wide: bool = False
) -> Sequence[Section]:
    """Return the slice of one rank of the flat tensors of a model, one for each dtype.

    With ``wide`` in the dtype of sums: float32 for 16-bit parameters.

    >>> sections({"w": Tensor([1.0, 2.0, 3.0, 4.0, 5.0])}, slices=2)
    [Section(numel=3, itemsize=4)]
    """
    if wide:
        tensors = {n: t.to(accumulation_dtype(t.dtype)) for n, t in tensors.items()}
    layout = Layout.of(tensors, slices)
    found = zip(layout.numels, layout.dtypes, strict=True)
    return [Section(numel // slices, dtype.itemsize) for numel, dtype in found]


def partners(source: Ranks, to: Ranks, size: int) -> Ranks:
    """Return (most, size) with whom each participant has messages, filled up with itself.

    >>> partners(np.array([0, 1]), np.array([1, 2]), size=3)
    array([[1, 0, 1],
           [0, 2, 2]])
    """
    # Both directions of every pair once, in the order of ranks; a rank's own are numbered.
    pairs = np.unique(np.concatenate((source * size + to, to * size + source)))
    rank, partner = np.divmod(pairs, size)
    turn = np.arange(len(rank)) - np.searchsorted(rank, rank)
    near = np.tile(np.arange(size), (int(turn.max(initial=-1)) + 1, 1))
    near[turn, rank] = partner
    return near


def gather_slices(clocks: Clocks, held: Sequence[Section], over: Axis) -> None:
    """Let every node gather its slices of an exchange over "node"; every rank waits for them."""
    if over == "node" and clocks.fabric.ranks_per_node > 1:
        for section in held:
            clocks.wait(clocks.all_gather(clocks.now, section.nbytes, "local"))
