"""The mean gradient, exchanged in buckets during backward."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, final

import torch

from offbeat.comm.collectives import all_reduce, peers_of_mean
from offbeat.comm.group import Group, message_device
from offbeat.exchange import BoundGradients, GradientExchange, Saved, Site, Variable
from offbeat.functional import runs_within
from offbeat.gradients.bucket import FIRST_BUCKET, Bucket, agree_on_order, capacity, require_first
from offbeat.gradients.saved_order import declared_order
from offbeat.settings import above, check_settings


@final
@dataclass(frozen=True, kw_only=True)
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

    Bytes sent per step: 2 (P-1)/P of the gradients' (of half of them with "bf16"). Extra memory:
    the buckets, one copy of the gradients, in full precision only until ``.grad`` becomes a view
    of them at the end of backward; with "bf16" the 16-bit copy, twice; with a partition the
    rank's share, and what is in flight.
    Passes over memory: two (copy, scale) over buckets that fit a cache; 16 bits: two more.

    Source: Li et al. 2020, "PyTorch Distributed", section 3.2.
    """

    over: Literal["world", "local"] = "world"
    wire: Literal["bf16"] | Annotated[None, "full precision"] = None
    bucket_mb: Annotated[float, above(0, "MiB")] = 25.0
    partition: bool = False

    def __post_init__(self) -> None:
        """Check the settings, and that a partition stays inside a node."""
        check_settings(self)
        if self.partition and (self.over != "local" or self.wire is not None):
            raise ValueError(
                f"partition=True with over={self.over!r} and wire={self.wire!r}: gradients are "
                "reduced inside a node, in full precision; use over='local' and wire=None"
            )

    @property
    def takes_shards(self) -> bool:
        """Whether it can be used with a sharded model: not with a partition of another kind."""
        return not self.partition

    def peers(self, site: Site) -> Collection[int] | None:
        """Return none, as a mean is a sum; any for 16-bit messages and for owners of layers."""
        if self.partition or self.wire is not None:
            return None
        return peers_of_mean(site.parameters.values())

    def bind(self, site: Site) -> "BoundMean":
        """Build buckets in reverse order of registration, until the first backward is over."""
        assert site.group is not None, "a slot alone in its group is disabled"
        bound = BoundMean(site, self, site.group, list(site.parameters)[::-1])
        bound.build()
        return bound


@dataclass(eq=False)
class BoundMean(BoundGradients):
    """:class:`Mean` on one replica; only the order is saved.

    Attributes:
        group: the members that exchange.
        order: the parameters in the order in which they became ready on rank 0.
        is_measured: whether that was measured; reverse order of registration before.
        seen: parameters that are ready in this backward, in order.
        buckets: in the order of their launches, equal on all ranks.
        home: the bucket of each parameter.
        launched: how many buckets of this backward were launched.
    """

    site: Site
    settings: Mean
    group: Group
    order: list[str]
    is_measured: bool = False
    seen: list[str] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    home: dict[str, Bucket] = field(default_factory=dict)
    launched: int = 0

    def state(self) -> Iterator[Variable]:
        """Yield the order of readiness: it decides in which order floats are added."""
        return declared_order(self, self.site.parameters)

    def load(self, saved: Saved) -> None:
        """Restore the order, which is equal on all ranks."""
        super().load(saved)
        self.build()

    def ready(self, name: str) -> None:
        """Launch the buckets that miss no gradient, in order."""
        bucket = self.home[name]
        require_first(self.group, name, bucket.missing)
        self.seen.append(name)
        bucket.missing.discard(name)
        while not self.complete() and not self.buckets[self.launched].missing:
            self._launch()

    def complete(self) -> bool:
        """Return whether every bucket was launched."""
        return self.launched == len(self.buckets)

    def finish(self) -> None:
        """Launch the buckets that miss gradients too, wait, and put the means into ``.grad``."""
        while not self.complete():
            self._launch()
        for bucket in self.buckets:
            bucket.wait()
            if self._is_marked(bucket):
                bucket.check()
            bucket.hand_out()
        if self.settings.partition:
            self._spread_nonfinite()
        self.launched = 0
        if not self.is_measured:
            self.order = agree_on_order(self.order, self.seen, self.group)
            self.is_measured = True
            self.build()
        self.seen.clear()

    def stepped(self) -> None:
        """Forget the means that owners have used."""
        for bucket in self.buckets:
            bucket.given.clear()

    def build(self) -> None:
        """Fill buckets anew, in the order of readiness."""
        parameters = self.site.parameters
        narrow = torch.bfloat16 if self.settings.wire == "bf16" else None
        owners = self.site.owners() if self.settings.partition else dict.fromkeys(parameters)
        self.buckets.clear()
        kinds = {name: (parameters[name].dtype, owners[name]) for name in self.order}
        for kind in dict.fromkeys(kinds.values()):
            names = [name for name in self.order if kinds[name] == kind]
            sizes = [parameters[name].nbytes for name in names]
            most = capacity(sum(sizes), int(self.settings.bucket_mb * 2**20))
            for run in runs_within(sizes, most, min(FIRST_BUCKET, most)):
                members = [names[i] for i in run]
                bucket = Bucket.of(self.site, self.group, members, narrow, kind[1])
                self.buckets.append(bucket)
        # By their last gradient: a bucket is launched after those before it.
        turn = {name: number for number, name in enumerate(self.order)}
        self.buckets.sort(key=lambda bucket: max(turn[name] for name in bucket.views))
        self.home = {name: bucket for bucket in self.buckets for name in bucket.views}

    def _launch(self) -> None:
        # In one order on every rank, whatever the order of readiness: collectives pair up by the
        # order of their launches, so a rank that let bucket 2 overtake bucket 1 would mix them.
        bucket = self.buckets[self.launched]
        bucket.fill()
        if self._is_marked(bucket):
            bucket.mark()
        bucket.send()
        for earlier in self.buckets[: self.launched]:
            earlier.release()
        self.launched += 1

    def _is_marked(self, bucket: Bucket) -> bool:
        # The first message tells for all: those of two backwards meet in the same order. But a mean
        # that only its owner sees could be its own by chance.
        return bucket is self.buckets[0] or bucket.owner is not None

    def _spread_nonfinite(self) -> None:
        # Only the owner has the gradients of its layers. If it alone skipped its step, the node
        # would make a part of an update, and its ranks would continue with different loss scales.
        grads = [p.grad for p in self.site.registered.values() if p.grad is not None]
        bad = torch.zeros(1, device=message_device(self.group))
        if grads:
            norms = torch.stack(torch._foreach_norm(grads, ord=torch.inf))
            bad.copy_(~norms.isfinite().all())
        all_reduce(bad, self.group).wait()
        if bad.item():  # on a GPU this waits for backward
            for grad in grads:
                grad.fill_(torch.nan)
