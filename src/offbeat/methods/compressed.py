"""Compressed gradients, exchanged during backward, with error feedback."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Tensor

from offbeat.exchange import Site, Variable
from offbeat.exchange.engine.bucket import in_buckets
from offbeat.exchange.engine.error_feedback import ErrorFeedback, FeedbackExchange
from offbeat.exchange.engine.message import FeedbackMessage, FlatMessage
from offbeat.exchange.engine.rows import Rows
from offbeat.exchange.engine.units import Units
from offbeat.settings import above, check_settings, describe
from offbeat.transport.collectives import all_reduce
from offbeat.transport.group import Group, message_device


class Compressor(ABC):
    """Exchanges one flat tensor (n), n > 0, in a compressed form.

    :class:`offbeat.methods.Compressed` makes one for each message, ``compressor(like, group)``,
    and uses it once per backward. Residuals, parameters without a gradient, gradients that are
    not finite, loss scales and checkpoints are handled outside of it.
    """

    def __init__(self, like: Tensor, group: Group) -> None:
        """Keep both; prepare for tensors with the shape (n), dtype and device of ``like``."""
        self.like, self.group = like, group

    @abstractmethod
    def launch(self, acc: Tensor) -> Tensor:
        """Compress ``acc`` (n) and launch its exchange, without waiting for it.

        Called in the same order on all members, so that it may launch collectives. ``acc`` stays
        unchanged. Returns what was sent, decompressed (n): the rest is the residual. Entries that
        are not finite may become anything.
        """

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait for the exchange; return the mean (n) of what all members sent, equal on all."""


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class Compressed(FeedbackExchange):
    r"""Exchanges gradients through a :class:`Compressor`, with error feedback.

    .. math::
        acc_t = \epsilon_{t-1} + G_t, \quad \epsilon_t = acc_t - C(acc_t), \quad
        g_t = \frac{1}{P} \sum_{p=1}^{P} C(acc^p_t)

    with the gradient G, the residual :math:`\epsilon` and the compression C of all gradients of a
    message. Messages are filled in the order in which gradients became ready on rank 0 in its
    first backward, launched during backward in that order on every rank, and smaller than
    ``message_mb`` where a model would fill fewer than eight. If any rank has a gradient that is
    not finite, all ranks' residuals stay as before this backward and every ``.grad`` becomes NaN.
    Residuals are saved by name; a world of another size continues with their mean. A parameter
    without a gradient on any rank keeps its residual, and its gradient stays None. A gradient that
    is discarded leaves no trace in residuals, see :class:`TopK`; what a compressor itself remembers
    (a warm start) is out of reach. Sparse gradients are averaged as by :class:`Mean`.

    Args:
        compressor: a subclass of :class:`Compressor`, or what makes one, given a flat tensor and a
            group. Its name must be equal on all ranks.
        message_mb: MiB of gradients in a message, before compression, at most.
        over: "world", or "local" for the ranks of a node.
        broadcast_buffers: as in :class:`Mean`.

    Bytes sent per step: the compressor's, and 8 (P-1)/P for each parameter and message. Extra
    memory: two models (three once several backwards exchange before a gradient is used), one copy
    of the gradients while backward runs, and the compressor's. Passes over memory: four (add,
    subtract, check, copy), and the compressor's.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019,
    Algorithm 2.
    """

    compressor: Callable[[Tensor, Group], Compressor]
    message_mb: Annotated[float, above(0, "MiB")] = 25.0
    over: Literal["world", "local"] = "world"
    broadcast_buffers: bool = field(default=False, repr=False)
    takes_sparse: ClassVar[bool] = True  # averaged as they are

    def __post_init__(self) -> None:
        check_settings(self)

    def __repr__(self) -> str:
        return describe(self)

    def bind(self, site: Site) -> "BoundCompressed":
        """Build the messages."""
        units = Units.of(site.registered, (), site.scaler, "gradient")
        bound = BoundCompressed(site, self, units=units)
        bound.build()
        return bound


@final
class BoundCompressed(ErrorFeedback):
    """:class:`Compressed` on one replica; residuals are in the messages."""

    settings: Compressed

    def state(self) -> Iterator[Variable]:
        """Yield the order of readiness, and this rank's residuals by name."""
        yield from super().state()
        yield Variable("residual", "own", lambda: self.kept("residual"))

    def new_messages(self) -> list[FeedbackMessage]:
        """Return the messages, of one dtype, and that of sparse gradients."""
        site, settings = self.site, self.settings
        order = [name for name in self.order if name not in site.sparse]
        kinds = {name: site.parameters[name].dtype for name in order}
        sizes = {name: site.parameters[name].nbytes for name in order}
        found = [
            CompressedMessage(site, self.group, self.units, names, settings.compressor)
            for names in in_buckets(sizes, kinds, int(settings.message_mb * 2**20))
        ]
        return [*found, *([Rows(site, self.group)] if site.sparse else ())]


@final
class CompressedMessage(FlatMessage):
    """Gradients that a :class:`Compressor` exchanges, with error feedback.

    A small all-reduce beside each message counts the ranks that have a gradient of each
    parameter, and the ranks on which a value is not finite; it also compares the calls.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        units: Units,
        names: Sequence[str],
        compressor: Callable[[Tensor, Group], Compressor],
    ) -> None:
        super().__init__(site, group, units, names)
        like = self.mean.whole
        self.compressor = compressor(like, group) if like.numel() else None
        self.flags = torch.zeros(
            len(names) + 2, dtype=torch.int32, device=message_device(group, like.device)
        )

    def launch(self) -> None:
        """Compress and launch; subtract what was sent."""
        acc = self.residual.next.whole
        if self.compressor is not None:
            acc.sub_(self.compressor.launch(acc))
        # An infinity that was sent as one is a NaN here, and one that was clipped is left.
        self.write_flags(self.flags, acc)
        self.handle = all_reduce(self.flags, self.group)

    def wait(self) -> bool:
        """Wait for the mean; False if a value was not finite on some rank."""
        self.arrived = self.compressor.wait() if self.compressor is not None else None
        self.handle.wait()
        return self.read_flags(self.flags[None], self.group.size)

    def combine(self, mean: Tensor) -> None:
        """Write the mean, which all members have found."""
        if self.arrived is not None:
            mean.copy_(self.arrived).mul_(self.units.scales[self.names[0]].loss)
        self.arrived = None
