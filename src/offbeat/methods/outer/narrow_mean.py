"""Means in narrow messages that lose nothing: what rounding takes is added to the next ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from offbeat.functional.messages.narrowing import GROUP, Narrow, narrow_bytes, widen
from offbeat.kernels.dispatch import narrowing_on
from offbeat.platform.device import has_streams
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle
from offbeat.transport.messages import exchange_with_all


@final
@dataclass(eq=False)
class NarrowMean:
    r"""Averages a flat tensor over a group again and again, in messages of 16 or 8 bits.

    Every member is the owner of one n-th, which the others send to it. It adds them in full
    precision, rounds the mean, and sends that to all:

    .. math::
        m_i = C(d_i + e_i), \quad e_i \leftarrow d_i + e_i - m_i, \qquad
        \bar m = C\Big(\frac{1}{n} \sum_i m_i + \bar e\Big), \quad
        \bar e \leftarrow \frac{1}{n} \sum_i m_i + \bar e - \bar m

    So the sum of all means, the mean of all e and the owners' errors add up to the mean of all
    that was put in. Sends 2 (n-1)/n of the narrow bytes. Memory: one tensor and 1/n of one, and
    twice the narrow bytes.
    """

    group: Group
    wire: Narrow
    error: Tensor  # e
    mean_error: Tensor  # of the part that this rank owns
    outgoing: Tensor
    incoming: Tensor

    @classmethod
    def of(cls, like: Tensor, wire: Narrow, group: Group) -> "NarrowMean":
        """Allocate for tensors like this one."""
        part = -(-like.numel() // (group.size * GROUP)) * GROUP
        rows = group.size, narrow_bytes(part, wire)
        messages = [torch.zeros(rows, dtype=torch.uint8, device=like.device) for _ in range(2)]
        error, mean_error = like.new_zeros(group.size * part), like.new_zeros(part)
        return cls(group, wire, error, mean_error, *messages)

    @property
    def memory(self) -> list[Tensor]:
        """The errors and the buffers of messages."""
        return [self.error, self.mean_error, self.outgoing, self.incoming]

    def launch(self, delta: Tensor) -> Handle:
        """Average ``delta`` in place, without waiting."""
        self.error[: delta.numel()].add_(delta)
        narrow = narrowing_on(delta.device)
        for part, message in zip(self._parts(self.error), self.outgoing, strict=True):
            narrow(part, message, self.wire)
        if has_streams(delta.device):  # streams keep the order: nothing here blocks the host
            self._run(delta)
            return Handle(self.group, [], [delta])
        return Handle(self.group, buffers=[delta], future=self.group.lane.submit(self._run, delta))

    def forget(self) -> None:
        """Discard the errors."""
        self.error.zero_()
        self.mean_error.zero_()

    def errors(self, numel: int) -> dict[str, Tensor]:
        """Return copies of both errors at their places in a tensor of ``numel`` values."""
        mean_error = torch.zeros_like(self.error)
        self._parts(mean_error)[self.group.rank].copy_(self.mean_error)
        return {"sent": self.error[:numel].clone(), "means": mean_error[:numel]}

    def restore(self, errors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`errors` returned."""
        self.forget()
        full = torch.zeros_like(self.error)
        full[: len(errors["means"])].copy_(errors["means"])
        self.mean_error.copy_(self._parts(full)[self.group.rank])
        self.error[: len(errors["sent"])].copy_(errors["sent"])

    def _parts(self, flat: Tensor) -> Tensor:
        return flat.view(self.group.size, -1)

    def _run(self, delta: Tensor) -> None:
        rank, size, group = self.group.rank, self.group.size, self.group
        # Point-to-point messages only: the training thread may launch collectives on the same
        # group meanwhile, and ranks would launch both in different orders.
        exchange_with_all(self.outgoing, self.incoming, group)
        self.incoming[rank] = self.outgoing[rank]
        total, wide = torch.zeros_like(self.mean_error), torch.empty_like(self.mean_error)
        for message in self.incoming:  # in the order of ranks
            total.add_(widen(message, wide, self.wire))
        self.mean_error.add_(total.div_(size))
        narrowing_on(delta.device)(self.mean_error, self.outgoing[rank], self.wire)
        self.incoming[rank] = self.outgoing[rank]
        exchange_with_all([self.outgoing[rank]] * size, self.incoming, group)
        mean = torch.empty_like(self.error)
        for message, part in zip(self.incoming, self._parts(mean), strict=True):
            widen(message, part, self.wire)
        delta.copy_(mean[: delta.numel()])
