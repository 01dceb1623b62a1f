"""The interfaces of the exchanges that fill the two slots of a training step."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from offbeat.exchange.bound import BoundGradients, BoundParameters
from offbeat.exchange.site import Site
from offbeat.exchange.state import Saved
from offbeat.settings import call_text

OnLoss = Literal["again", "anew"]


class Exchange(ABC):  # noqa: B024 (the methods that are abstract differ by kind)
    """Holds the settings of an exchange in one of the two slots; immutable.

    All that it keeps about one replica is in what ``bind`` returns. Subclasses of
    :class:`GradientExchange` and :class:`ParameterExchange` are final: compose, do not inherit
    further.
    """

    def __str__(self) -> str:
        """Return the call that makes it, without the arguments that are defaults."""
        return call_text(type(self), vars(self))

    @property
    def on_loss(self) -> OnLoss | None:
        """How an elastic run goes on after a loss; None if it ends.

        "again": an exchange is a transaction. It calls :meth:`offbeat.Site.commit` once all has
        arrived and before it writes parameters, gradients and state that is not scratch, so that a
        loss before leaves everything as it was. "anew": the parameters are still this rank's own
        after a wait has raised :class:`PeerLost`, and survivors begin from models that differ.
        """
        return None

    @property
    def takes_weights(self) -> bool:
        """Whether participants may have weights (:meth:`offbeat.Replica.set_weight`).

        Then each multiplies what it adds to a mean by :attr:`offbeat.Site.factor`, on which a
        gradients slot has agreed before; :class:`offbeat.exchange.weights.Window` agrees on it for
        several steps.
        """
        return False

    def peers(self, site: Site) -> Collection[int] | None:
        """Return the participants with which this one exchanges messages beside collectives.

        By their number; None, the default, for any of them. Groups connect only these, and those
        that sums, gathers and broadcasts from the first need. Participants must name each other,
        and all have some or none. ``site`` has no group but ``control``. All ranks call before
        ``bind``, and raise alike.
        """
        return None


class GradientExchange(Exchange):
    """Combines gradients inside backward: ``.grad`` is complete when ``backward()`` returns."""

    over: Literal["world", "local"]
    # Each gradient is reduced to one rank of the node, which steps the parameter for all of them.
    partition: bool = False
    # Whether the buffers of the first rank of the group reach the others in every exchange; None:
    # they do over "world".
    broadcast_buffers: bool | None = False
    # Whether a rank that misses a result can go on with the parameters and optimizers of one that
    # has it: they are equal on all ranks, and what is own follows from what this rank has sent.
    is_healable: ClassVar[bool] = False
    # Whether torch's DistributedDataParallel does the work; elsewhere a wrapper is an error.
    is_wrapper: ClassVar[bool] = False

    @property
    def takes_shards(self) -> bool:
        """Whether it can combine gradients of shards between nodes, or leave those inside to FSDP2.

        It then reads and writes them by :mod:`offbeat.exchange.engine.dot_grad`.
        """
        return False

    @property
    def takes_sparse(self) -> bool:
        """Whether it exchanges the sparse gradients of :attr:`offbeat.Site.sparse`."""
        return False

    def fault(
        self, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> str | None:
        """Return why these optimizers of this rank cannot be used, or None; no communication.

        All ranks ask before they open a group, also those whose slot will be disabled.
        """
        return None

    def resolved(self, parameters: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Return what settings that are functions give for these parameters; nothing by default.

        Plain values, which are compared between ranks before any group is opened: of a function
        the settings themselves show the name only. :meth:`fault` has returned None.
        """
        return {}

    @abstractmethod
    def bind(self, site: Site) -> BoundGradients:
        """Allocate the buffers and return the live exchange; all ranks call."""

    def inherit(
        self, saved: Mapping[int, Saved], before: int, rank: int, size: int
    ) -> Saved | None:
        """Return the state of ``rank`` of ``size``, from what a world of ``before`` ranks saved.

        If the model is sharded, these are the numbers of nodes. By default all ranks save the same
        state, and a world of another size starts anew (None). Raises ``ValueError`` if the state of
        a rank that is needed is missing.
        """
        return next(iter(saved.values()), None) if before == size else None

    def remarks(self, site: Site) -> Sequence[str]:
        """Return notes for the user about what this exchange was given; none by default."""
        return ()


class ParameterExchange(Exchange):
    """Combines parameters after the optimizer has stepped."""

    over: Literal["world", "node"]
    # Each rank of a node steps its own share of the parameters, and `step` gathers all of them.
    partition: bool = False
    # Whether `step` may wait for other ranks; then the first one also compares their parameters.
    waits: ClassVar[bool] = True
    # Whether a rank that starts from other parameters than the rest spoils the first exchange.
    starts_equal: ClassVar[bool] = False
    # Whether parameters written between the attach and the first step, on all ranks alike, do so.
    anchored: ClassVar[bool] = False

    @abstractmethod
    def bind(self, site: Site) -> BoundParameters:
        """Allocate the buffers and return the live exchange; all ranks call, with equal parameters.

        In an elastic run also after a loss or a join, with parameters that may differ.
        """

    def growth_fault(self, size: int) -> str | None:
        """Return why ``size`` participants could not exchange, or None: one more wants to join."""
        return None
