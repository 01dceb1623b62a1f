"""Layers that are sent whole, with residuals of earlier, sparse messages."""

import math
from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.exchange.engine.bucket import Bucket
from offbeat.exchange.engine.feedback import Feedback
from offbeat.exchange.engine.message import FeedbackMessage
from offbeat.exchange.engine.units import Scale, Units
from offbeat.functional import LinkCost
from offbeat.methods.top_k.correction import Correction
from offbeat.transport.group import Group


@final
class DenseMessage(FeedbackMessage):
    """Bucket whose gradients are added to the residuals that earlier, sparse messages left.

    Once these were used it has none, and no memory for them.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        units: Units,
        names: Sequence[str],
        correction: Correction,
    ) -> None:
        super().__init__(names)
        self.parameters, self.units, self.correction = site.parameters, units, correction
        self.bucket = Bucket(site, group, names)
        self.feedback: dict[str, Feedback] = {}
        if correction.momentum:
            self.feedback["velocity"] = Feedback(site.parameters, names)

    def remember(self, kind: str, name: str, kept: Tensor) -> None:
        """Start from what another message has left, unless it is nothing."""
        if kept.any():
            if kind not in self.feedback:
                self.feedback[kind] = Feedback(self.parameters, self.names)
            super().remember(kind, name, kept)

    def resolve(self, used: Collection[str], discarded: Collection[str], *, is_last: bool) -> None:
        """Resolve residuals, and forget them once all were used."""
        super().resolve(used, discarded, is_last=is_last)
        if is_last and "residual" in self.feedback and self.feedback["residual"].is_zero:
            del self.feedback["residual"]

    def add(self, name: str, *, continues: bool) -> None:
        """Do nothing: a bucket is filled in one pass at its launch."""

    def launch(self) -> None:
        """Fill the bucket, add velocities and residuals, and launch its all-reduce."""
        # With weights on all ranks alike, also on one without residuals: a receiver of 16 bits
        # multiplies all that arrives by the shares, or nothing.
        is_weighted = self.bucket.site.shares is not None
        is_corrected = is_weighted or bool(self.feedback) or self.correction.limit is not None
        self.bucket.fill(is_weighed=is_corrected)
        if is_corrected:
            for name, view in self.bucket.views.items():
                self._correct(name, view, self.units.scales[name])
        self.bucket.send()

    def wait(self) -> bool:
        """Wait for the mean; its sum is finite only if every rank's gradients are."""
        self.bucket.wait()
        return math.isfinite(self.bucket.buffer.sum(dtype=torch.float64))

    def commit(self) -> None:
        """Put the means into ``.grad`` and drop the residuals that were sent."""
        if self.feedback:
            flags = zip(self.names, self.bucket.flags.tolist(), strict=True)
            unused = [name for name, had in flags if not had]
            for feedback in self.feedback.values():
                feedback.commit(unused)
        self.bucket.commit()

    def undo(self) -> None:
        """Set every ``.grad`` to NaN; residuals and velocities were not changed."""
        for view in self.bucket.views.values():
            view.fill_(math.nan)
        self.bucket.commit()

    def seconds(self, link: LinkCost) -> float:
        """Return the duration of an all-reduce of the bucket."""
        return link.all_reduce(self.bucket.buffer.nbytes)

    def _correct(self, name: str, grad: Tensor, scale: Scale) -> None:
        grad.copy_(self.correction.clipped(grad, scale.loss))
        if (velocity := self.feedback.get("velocity")) is not None:
            now = velocity.next.views[name]
            torch.mul(velocity.latest[name], self.correction.momentum, out=now)
            now.add_(grad.to(now.device), alpha=scale.weight / scale.loss)
            grad.copy_(now).mul_(scale.loss)
        else:
            grad.mul_(scale.weight)
        if (residual := self.feedback.get("residual")) is not None:
            left = residual.next.views[name].copy_(residual.latest[name])
            if scale.to_grad:  # at a learning rate of 0 nothing is sent
                grad.add_(left.to(grad.device), alpha=scale.to_grad)
                left.zero_()
