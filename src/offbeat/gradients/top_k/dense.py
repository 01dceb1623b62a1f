"""Layers that are sent whole, with residuals of earlier, sparse messages."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.comm.group import Group
from offbeat.exchange import Site
from offbeat.functional import LinkCost
from offbeat.gradients.bucket import Bucket
from offbeat.gradients.feedback import LayerFeedback
from offbeat.gradients.message import FeedbackMessage
from offbeat.gradients.top_k.correction import Correction
from offbeat.gradients.units import Units


@final
class DenseMessage(FeedbackMessage):
    """Bucket whose gradients are added to the residuals that earlier, sparse messages left."""

    def __init__(
        self,
        site: Site,
        group: Group,
        units: Units,
        names: Sequence[str],
        correction: Correction,
    ) -> None:
        super().__init__(names)
        self.bucket = Bucket(site, group, names)
        self.units, self.correction = units, correction
        self.residual = LayerFeedback({})
        self.velocity = LayerFeedback(
            {n: _wide(site.parameters[n]) for n in names if correction.momentum}
        )
        self.feedback = {"residual": self.residual}
        if correction.momentum:
            self.feedback["velocity"] = self.velocity
        self.faster: dict[str, Tensor] = {}  # the velocities of this backward
        self.sent: set[str] = set()  # whose residual is part of it

    def add(self, name: str, *, continues: bool) -> None:
        """Do nothing: a bucket is filled in one pass at its launch."""

    def launch(self) -> None:
        """Fill the bucket, add velocities and residuals, and launch its all-reduce."""
        self.bucket.fill()
        scales = self.units.scales
        if self.correction.limit is not None:
            for name, view in self.bucket.views.items():
                view.copy_(self.correction.clipped(view, scales[name].loss))
        for name, before in self.velocity.latest.items():
            view, loss = self.bucket.views[name], scales[name].loss
            now = before.mul(self.correction.momentum).add_(view.to(before.device), alpha=1 / loss)
            self.faster[name] = now
            view.copy_(now).mul_(loss)
        residual = self.residual.latest
        self.sent = {name for name in residual if scales[name].rate}
        for name in self.sent:
            view = self.bucket.views[name]
            view.add_(residual[name].to(view.device), alpha=scales[name].leave)
        self.bucket.send()

    def wait(self) -> bool:
        """Wait for the mean; its sum is finite only if every rank's gradients are."""
        self.bucket.wait()
        return math.isfinite(self.bucket.buffer.sum(dtype=torch.float64))

    def commit(self) -> None:
        """Put the means into ``.grad`` and drop the residuals that were sent."""
        had = self._had() if self.sent or self.faster else set()
        gone, latest = self.sent & had, self.residual.latest
        self.residual.commit({name: left for name, left in latest.items() if name not in gone})
        faster = {name: now for name, now in self.faster.items() if name in had}
        self.velocity.commit({**self.velocity.latest, **faster})
        self.bucket.commit()

    def undo(self) -> None:
        """Set every ``.grad`` to NaN; residuals and velocities were not changed."""
        for view in self.bucket.views.values():
            view.fill_(math.nan)
        self.bucket.commit()

    def seconds(self, link: LinkCost) -> float:
        """Return the duration of an all-reduce of the bucket."""
        return link.all_reduce(self.bucket.buffer.nbytes)

    def _had(self) -> set[str]:
        flags = self.bucket.flags.tolist()
        return {name for name, had in zip(self.bucket.views, flags, strict=True) if had}


def _wide(parameter: Tensor) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
