"""The plan of messages: which layers are sent dense, and the density of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offbeat.exchange import Site
from offbeat.functional import count_kept, is_cheaper_dense, runs_within
from offbeat.functional.cost import INDEX
from offbeat.functional.sixteen_bits import Sixteen
from offbeat.gradients.bucket import BUCKET, FIRST_BUCKET, capacity
from offbeat.gradients.message import Message
from offbeat.gradients.pipeline import by_readiness
from offbeat.gradients.top_k.correction import Correction
from offbeat.gradients.top_k.dense import DenseMessage
from offbeat.gradients.top_k.payload import value_dtype
from offbeat.gradients.top_k.sparse import SparseMessage
from offbeat.kernels.dispatch import BlockSelect

Choice = tuple[Sequence[str], int]  # parameters, and how many of their entries are sent; 0: all


@dataclass(frozen=True)
class MessagePlan:
    """Density of each layer; two plans are equal if they send the same.

    Attributes:
        site: the parameters and the group.
        densities: the share of entries that is sent, by parameter.
        message_mb: MiB of a sparse message.
        wire: the format of values of 16 bits in sparse messages, None for full precision.
        whole: select among all entries of the model (of each dtype), not of each parameter.
    """

    site: Site = field(compare=False)
    densities: Mapping[str, float]
    message_mb: float
    wire: Sixteen | None = None
    whole: bool = False

    def messages(
        self, order: Sequence[str], *, select: BlockSelect, correction: Correction
    ) -> list[Message]:
        """Build the messages of a backward, in the order in which all ranks launch them.

        Args:
            order: the parameters in the order in which their gradients become ready.
            select: selects the entries of sparse layers, see
                :func:`offbeat.kernels.dispatch.top_k_of_blocks`.
            correction: clipping and momentum correction.
        """
        group = self.site.group
        assert group is not None, "a slot alone in its group is disabled"
        messages: list[Message] = []
        for blocks in self._parted(self._blocks(order)):
            if blocks[0][1] == 0:
                members = [name for names, _ in blocks for name in names]
                messages.append(DenseMessage(self.site, group, members, correction))
            else:
                messages.append(
                    SparseMessage(
                        self.site,
                        group,
                        blocks,
                        select=select,
                        correction=correction,
                        wire=self.wire,
                    )
                )
        return by_readiness(messages, order)

    def density_of(self, name: str) -> float:
        """Return the share of a layer that is sent; 1 if all is."""
        parameter = self.site.parameters[name]
        k = self._kept([name])
        return k / parameter.numel() if k else 1.0

    def _blocks(self, order: Sequence[str]) -> list[Choice]:
        if not self.whole:
            return [((name,), self._kept([name])) for name in order]
        dtypes = dict.fromkeys(self.site.parameters[name].dtype for name in order)
        runs = [[n for n in order if self.site.parameters[n].dtype == dtype] for dtype in dtypes]
        blocks = [(names, self._kept(names)) for names in runs]
        # A model that is sent dense need not wait for its last layer.
        return [
            b for names, k in blocks for b in ([(names, k)] if k else [((n,), 0) for n in names])
        ]

    def _kept(self, names: Sequence[str]) -> int:
        """Return how many entries are sent; 0 where sending all costs no more."""
        parameters = [self.site.parameters[name] for name in names]
        numel = sum(parameter.numel() for parameter in parameters)
        k = count_kept(numel, self.densities[names[0]])
        dtype = parameters[0].dtype
        value = value_dtype(dtype, self.wire).itemsize
        return 0 if is_cheaper_dense(numel, k, value, self.site.size, dtype.itemsize) else k

    def _parted(self, blocks: Sequence[Choice]) -> list[list[Choice]]:
        """Part blocks of one kind and dtype into runs that fit a message."""
        kinds: dict[tuple[torch.dtype, bool], list[Choice]] = {}
        for names, k in blocks:
            kinds.setdefault((self.site.parameters[names[0]].dtype, k == 0), []).append((names, k))
        parted = []
        for (dtype, dense), members in kinds.items():
            entry = value_dtype(dtype, self.wire).itemsize + INDEX
            sizes = [
                sum(self.site.parameters[n].nbytes for n in names) if dense else k * entry
                for names, k in members
            ]
            most = capacity(sum(sizes), BUCKET) if dense else int(self.message_mb * 2**20)
            first = min(FIRST_BUCKET, most) if dense else most
            parted += [[members[i] for i in run] for run in runs_within(sizes, most, first)]
        return parted
