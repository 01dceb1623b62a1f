"""Which layers are sent whole, how much of the others, and what travels together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offbeat.exchange import Site
from offbeat.functional import count_kept, is_cheaper_dense, runs_within
from offbeat.gradients.bucket import BUCKET, FIRST_BUCKET, capacity
from offbeat.gradients.top_k.dense import DenseMessage
from offbeat.gradients.top_k.message import Message
from offbeat.gradients.top_k.sparse import SparseMessage

Choice = tuple[Sequence[str], int]  # parameters, and how many of their entries are sent; 0: all


@dataclass(frozen=True)
class MessagePlan:
    """How dense each layer is sent; two plans are equal if they send the same.

    ``densities`` hold what differs from ``density``. With ``whole`` the entries of the model (of
    each dtype) compete with each other, otherwise those of each parameter.
    """

    site: Site = field(compare=False)
    density: float
    message_mb: float
    whole: bool = False
    densities: Mapping[str, float] = field(default_factory=dict)

    def messages(self, order: Sequence[str], *, momentum: float, exact: bool) -> list[Message]:
        """The messages of a backward, in the order in which all ranks launch them."""
        group = self.site.group
        assert group is not None, "a slot alone in its group is replaced by nothing"
        placed: list[tuple[int, Message]] = []
        place = {name: index for index, name in enumerate(order)}
        for blocks in self._parted(self._blocks(order)):
            members = [name for names, _ in blocks for name in names]
            message: Message
            if blocks[0][1] == 0:
                message = DenseMessage(self.site, group, members, momentum)
            else:
                message = SparseMessage(self.site, group, blocks, momentum=momentum, exact=exact)
            placed.append((max(map(place.__getitem__, members)), message))
        # A message can leave when its last gradient is ready; whoever can leave first goes first.
        return [message for _, message in sorted(placed, key=lambda pair: pair[0])]

    def density_of(self, name: str) -> float:
        """How much of a layer is sent; 1 where all is."""
        parameter = self.site.parameters[name]
        k = self._kept([name])
        return k / parameter.numel() if k else 1.0

    def _blocks(self, order: Sequence[str]) -> list[Choice]:
        if not self.whole:
            return [((name,), self._kept([name])) for name in order]
        dtypes = dict.fromkeys(self.site.parameters[name].dtype for name in order)
        runs = [[n for n in order if self.site.parameters[n].dtype == dtype] for dtype in dtypes]
        blocks = [(names, self._kept(names)) for names in runs]
        # A whole model that is sent dense need not wait for its last layer.
        return [
            b for names, k in blocks for b in ([(names, k)] if k else [((n,), 0) for n in names])
        ]

    def _kept(self, names: Sequence[str]) -> int:
        """How many entries are sent; 0 where sending all costs no more."""
        parameters = [self.site.parameters[name] for name in names]
        numel = sum(parameter.numel() for parameter in parameters)
        k = count_kept(numel, self.densities.get(names[0], self.density))
        narrow = parameters[0].dtype.itemsize
        wide = torch.promote_types(parameters[0].dtype, torch.float32).itemsize
        return 0 if is_cheaper_dense(numel, k, wide, self.site.size, narrow) else k

    def _parted(self, blocks: Sequence[Choice]) -> list[list[Choice]]:
        """Blocks of one kind and dtype, in runs that fit a message."""
        kinds: dict[tuple[torch.dtype, bool], list[Choice]] = {}
        for names, k in blocks:
            kinds.setdefault((self.site.parameters[names[0]].dtype, k == 0), []).append((names, k))
        parted = []
        for (dtype, dense), members in kinds.items():
            wide = torch.promote_types(dtype, torch.float32).itemsize
            sizes = [
                sum(self.site.parameters[n].nbytes for n in names) if dense else k * (wide + 4)
                for names, k in members
            ]
            most = capacity(sum(sizes), BUCKET) if dense else int(self.message_mb * 2**20)
            first = min(FIRST_BUCKET, most) if dense else most
            parted += [[members[i] for i in run] for run in runs_within(sizes, most, first)]
        return parted
