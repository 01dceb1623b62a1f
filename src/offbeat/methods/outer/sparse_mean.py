"""Means of the largest entries: each rank sends few, and keeps the others for the next ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, final

import torch
from torch import Tensor

from offbeat.functional import Segment
from offbeat.functional.messages.sparse_messages import (
    Bits,
    SparseFormat,
    add_sparse,
    chunks_of,
    fill_sparse,
)
from offbeat.kernels.dispatch import top_k_of_blocks
from offbeat.settings import between, check_settings
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """What is sent of a pseudo-gradient: the ``wire`` of :class:`OuterStep` in SparseLoCo.

    Args:
        density: the share of entries that is sent of each chunk of 4096, at least one entry.
        decay: the paper's beta, the factor of what was not sent when the next pseudo-gradient is
            added to it: 0.95 forgets 5 % of what waits in each exchange, 1 loses nothing.
        bits: of a value; None for float32, or float64 for 64-bit parameters.

    >>> Sparse().density
    0.015625
    """

    density: Annotated[float, between(0, 1, closed="right")] = 1 / 64
    decay: Annotated[float, between(0, 1)] = 0.95
    bits: Bits | Annotated[None, "full precision"] = 2

    def __post_init__(self) -> None:
        check_settings(self)


@final
@dataclass(eq=False)
class SparseMean:
    r"""Averages the largest entries of a flat tensor over a group, with error feedback.

    .. math::
        acc_i = \beta e_i + \Delta_i, \quad m_i = Q(TopK(acc_i)), \quad e_i = acc_i - m_i, \quad
        \bar\Delta = \frac{1}{n} \sum_{i=1}^{n} m_i

    Sends n-1 times a message, see :class:`SparseFormat`. Memory: one tensor, n messages, and 16
    bytes for each entry sent. Source: Sarfi et al. 2025, Algorithm 1.
    """

    group: Group
    decay: float
    form: SparseFormat
    error: Tensor  # e
    messages: Tensor

    @classmethod
    def of(
        cls, like: Tensor, sparse: Sparse, segments: Iterable[Segment], group: Group
    ) -> "SparseMean":
        """Allocate for tensors like this one, made of ``segments`` of layers."""
        chunks = chunks_of(segments, sparse.density)
        form = SparseFormat(chunks, sparse.bits, like.dtype, like.device)
        rows = group.size, form.nbytes
        messages = torch.zeros(rows, dtype=torch.uint8, device=like.device)
        return cls(group, sparse.decay, form, torch.zeros_like(like), messages)

    @property
    def memory(self) -> list[Tensor]:
        """The errors and the buffers of messages."""
        return [self.error, self.messages]

    def launch(self, delta: Tensor) -> Handle:
        """Average the largest entries of ``delta`` in place, without waiting."""
        if not self.form.chunks:  # a slice that is filled up with zeros
            return Handle(self.group)
        torch.add(delta, self.error, alpha=self.decay, out=self.error)
        mine = self.messages[self.group.rank]
        fill_sparse(self.error, self.form, mine, top_k_of_blocks(delta.device))
        # A collective: every rank launches it from the thread that trains, in the same order.
        handle = all_gather(self.messages.view(-1), mine, self.group)
        handle.after = lambda: self._add_up(delta)
        return handle

    def forget(self) -> None:
        """Discard the errors."""
        self.error.zero_()

    def errors(self, numel: int) -> dict[str, Tensor]:
        """Return a copy of the error."""
        return {"sent": self.error[:numel].clone()}

    def restore(self, errors: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`errors` returned."""
        self.error.copy_(errors["sent"])

    def _add_up(self, delta: Tensor) -> None:
        delta.zero_()
        for message in self.messages:  # in the order of ranks
            add_sparse(message, self.form, delta)
        delta.div_(self.group.size)
