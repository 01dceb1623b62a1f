"""The mean gradient, exchanged in buckets during backward."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, final

import torch

from offbeat.exchange import GradientExchange, Site
from offbeat.exchange.engine.bucket import Bucket, in_buckets
from offbeat.exchange.engine.engine import Engine
from offbeat.exchange.engine.message import Message
from offbeat.exchange.engine.rows import Rows
from offbeat.exchange.interface import OnLoss
from offbeat.settings import above, check_settings, describe
from offbeat.transport.collectives import all_reduce, peers_of_mean
from offbeat.transport.group import message_device


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class Mean(GradientExchange):
    r"""Averages the gradients of all ranks, overlapped with backward.

    .. math:: g = \frac{1}{P} \sum_{p=1}^{P} g_p

    With ``partition`` (over "local") the mean of each parameter is sent to the one rank of the
    node that owns it (:meth:`offbeat.Site.owners`), and ``.grad`` is None elsewhere. A gradient
    that is not finite makes those of all ranks of the node NaN, so that their scalers skip alike.
    Other ranks drop a gradient once it is in its bucket, and the bucket once it was sent.

    ``over`` is "world" or "local" (the ranks of a node). ``wire="bf16"`` halves the bytes: cast
    once, summed in float32, rounded once. Buckets are filled in the order in which
    gradients became ready on rank 0 in its first backward, and launched in that order on every
    rank; they are smaller than ``bucket_mb`` where a model would fill fewer than eight. A parameter
    unused on some ranks counts as zero there; unused on all, its gradient stays None.

    ``.grad`` becomes a view of its bucket, which the next backward fills again. A tensor that the
    script keeps after it has cleared or replaced ``.grad``, or a view of one, is left alone, as in
    plain torch: its bucket then takes new memory. What is still in ``.grad`` changes in place.

    ``broadcast_buffers`` copies the buffers of the first rank of the group to the others at the end
    of every backward that exchanges: those that the model has at the attach, of any dtype. By
    default it does so over "world", as torch's DistributedDataParallel.

    The sparse gradient of an embedding is averaged row by row over the rows that any rank has
    touched, and stays sparse.

    Bytes sent per step: 2 (P-1)/P of the gradients' (of half of them with "bf16"), and the buffers;
    of a sparse gradient (P-1) m (d s + 4), for at most m rows of d entries of s bytes on a rank.
    Extra memory: a copy of the buffers; the buckets, one copy of the gradients, in full
    precision only until ``.grad`` becomes a view of them at the end of backward; with "bf16" the
    16-bit copy, twice; with a partition the rank's share, and what is in flight.
    Passes over memory: two (copy, scale) over buckets that fit a cache; 16 bits: two more.

    Source: Li et al. 2020, "PyTorch Distributed", section 3.2.
    """

    over: Literal["world", "local"] = "world"
    wire: Literal["bf16"] | Annotated[None, "full precision"] = None
    bucket_mb: Annotated[float, above(0, "MiB")] = 25.0
    partition: bool = False
    broadcast_buffers: bool | Annotated[None, 'True over "world"'] = field(default=None, repr=False)
    takes_weights: ClassVar[bool] = True
    is_healable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self)
        if self.broadcast_buffers is (self.over == "world"):
            object.__setattr__(self, "broadcast_buffers", None)  # one text for one setting
        if self.partition and (self.over != "local" or self.wire is not None):
            raise ValueError(
                f"partition=True with over={self.over!r} and wire={self.wire!r}: gradients are "
                "reduced inside a node, in full precision; use over='local' and wire=None"
            )

    def __repr__(self) -> str:
        return describe(self)

    @property
    def takes_shards(self) -> bool:
        """Whether it can be used with a sharded model: not with a partition of another kind."""
        return not self.partition

    @property
    def takes_sparse(self) -> bool:
        """Whether gradients may be sparse: not with a partition, whose reduction is dense."""
        return not self.partition

    @property
    def on_loss(self) -> OnLoss | None:
        """The mean is made again; a lost owner of layers had their optimizer's state."""
        return None if self.partition else "again"

    def peers(self, site: Site) -> Collection[int] | None:
        """Return none, as a mean is a sum; any for 16-bit messages and for owners of layers."""
        if self.partition or self.wire is not None:
            return None
        return peers_of_mean(site.parameters.values())

    def bind(self, site: Site) -> "BoundMean":
        """Build the buckets."""
        bound = BoundMean(site, self)
        bound.build()
        return bound


@final
class BoundMean(Engine[Message]):
    """:class:`Mean` on one replica; only the order is saved."""

    settings: Mean

    def new_messages(self) -> list[Message]:
        """Return the buckets, of one dtype and one owner, and the message of sparse gradients."""
        site, settings = self.site, self.settings
        narrow = torch.bfloat16 if settings.wire == "bf16" else None
        owners = site.owners() if settings.partition else dict.fromkeys(self.order)
        order = [name for name in self.order if name not in site.sparse]
        kinds = {name: (site.parameters[name].dtype, owners[name]) for name in order}
        sizes = {name: site.parameters[name].nbytes for name in order}
        buckets = [
            Bucket(site, self.group, names, narrow, owners[names[0]])
            for names in in_buckets(sizes, kinds, int(settings.bucket_mb * 2**20))
        ]
        return [*buckets, *([Rows(site, self.group, narrow)] if site.sparse else ())]

    def build(self) -> None:
        """Build the buckets, and mark those by which calls are compared."""
        super().build()
        # The first message tells for all: those of two backwards meet in the same order. But a mean
        # that only its owner sees could be its own by chance.
        for message in self.messages[1:]:
            if isinstance(message, Bucket):
                message.is_marked = message.owner is not None

    def launch(self) -> None:
        """Launch the next bucket, and give the memory of others back that were sent to owners."""
        super().launch()
        if self.settings.partition:
            for earlier in self.messages[: self.launched - 1]:
                if isinstance(earlier, Bucket):
                    earlier.release()

    def collect(self) -> None:
        """Put the means into ``.grad``; NaN on all ranks of a node if one of them is not finite."""
        super().collect()
        if self.settings.partition:
            self._spread_nonfinite()

    def _spread_nonfinite(self) -> None:
        # Only the owner has the gradients of its layers. If it alone skipped its step, the node
        # would make a part of an update, and its ranks would continue with different loss scales.
        found = [p.grad for p in self.site.registered.values() if p.grad is not None]
        grads = [grad for grad in found if grad.numel()]
        bad = torch.zeros(1, device=message_device(self.group))
        if grads:
            norms = torch.stack(torch._foreach_norm(grads, ord=torch.inf))
            bad.copy_(~norms.isfinite().all())
        all_reduce(bad, self.group).wait()
        if bad.item():  # on a GPU this waits for backward
            for grad in grads:
                grad.fill_(torch.nan)
