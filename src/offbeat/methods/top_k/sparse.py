"""Messages of the largest entries of several layers, and their residuals."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.exchange.engine.feedback import Feedback
from offbeat.exchange.engine.flat import Flat
from offbeat.exchange.engine.message import FlatMessage
from offbeat.exchange.engine.units import Units
from offbeat.functional import LinkCost, extract
from offbeat.functional.messages.sixteen_bits import Sixteen
from offbeat.kernels.dispatch import BlockSelect
from offbeat.methods.top_k.correction import Correction
from offbeat.methods.top_k.payload import Payload, PayloadFormat
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device

_LIMIT = 2**31 - 1  # entries that an int32 index can name


@final
class SparseMessage(FlatMessage):
    """Values and int32 indices of the largest entries, and one flag for each parameter.

    ``blocks`` are runs of parameters, and how many entries are sent of each run; ``select`` returns
    indices into a flat tensor, given the tensor and the ranges of the blocks.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        units: Units,
        blocks: Sequence[tuple[Sequence[str], int]],
        correction: Correction,
        select: BlockSelect,
        wire: Sixteen | None = None,
    ) -> None:
        super().__init__(site, group, units, [name for names, _ in blocks for name in names])
        self.select, self.correction = select, correction
        if correction.momentum:
            self.feedback["velocity"] = Feedback(site.parameters, self.names)
        self.blocks = _lay_out(site, blocks)
        sizes = torch.tensor([site.parameters[name].numel() for name in self.names], device="cpu")
        self.ends = sizes.cumsum(0).to(self.mean.whole.device)
        own = site.parameters[self.names[0]]
        count = sum(k for _, _, k in self.blocks)
        # What has waited for many steps may be beyond the largest number of a float16 gradient;
        # one hundredth is left for rounding.
        self.most = 0.99 * torch.finfo(own.dtype).max / group.size
        self.is_bounded = own.dtype == torch.float16
        form = PayloadFormat(count, len(self.names), own.dtype, wire)
        self.gathered, self.rows = form.allocate(group.size, message_device(group, own.device))
        # A further backward before the step: what .grad held before it, and of the exchanges
        # before the last one.
        self.earlier: Flat | None = None
        self.carried: Flat | None = None
        self.again: set[str] = set()

    def add(self, name: str, *, continues: bool) -> None:
        """Add the gradient, or its velocity, to the residual."""
        grad, scale = self.read(name), self.units.scales[name]
        if continues:
            grad = self._new_part(name, grad)
        if grad is not None:
            grad = self.correction.clipped(grad, scale.loss)
        if (velocity := self.feedback.get("velocity")) is None:
            return self.accumulate(name, grad, scale.to_residual)
        now = velocity.next.views[name]  # u = m u + g, and u is what is added up
        torch.mul(velocity.latest[name], self.correction.momentum, out=now)
        if grad is not None:
            now.add_(grad, alpha=scale.weight / scale.loss)
        self.accumulate(name, now, scale.rate)

    def launch(self) -> None:
        """Select and launch; a value that is not finite is selected, so only these are checked."""
        # All blocks at once, not each when its gradient is ready and still in the cache: between
        # two matrix products the code is not in the cache and its branches are mispredicted.
        acc, mine = self.residual.next.whole, self._mine
        indices = self.select(acc, self.blocks)
        factor = self._factor(indices)
        values = _remove(acc, indices, factor)
        if self.correction.masking:
            _remove(self.feedback["velocity"].next.whole, indices, factor)
        sent = mine.put(self._bounded(values.mul_(factor / self.group.size)))
        if sent is not values:
            _add_back(acc, indices, (values - sent).mul_(self.group.size), factor)
        mine.indices.copy_(indices)
        self.write_flags(mine.flags, mine.values)
        self.handle = all_gather(self.gathered, mine.words, self.group)

    def wait(self) -> bool:
        """Wait for all members' rows; False if a flag says that one is not finite."""
        self.handle.wait()
        return self.read_flags(torch.stack([row.flags for row in self.rows]), 1)

    def combine(self, mean: Tensor) -> None:
        """Spread all rows, and add what the exchanges before in this step have brought."""
        self._spread(mean.zero_())
        if self.earlier is not None:
            for name, earlier in self.earlier.views.items():
                earlier.mul_(name in self.again)
            mean.add_(self.earlier.whole)
        self.carried, self.earlier, self.again = self.earlier, None, set()

    def undo(self) -> None:
        """Set every ``.grad`` to NaN; the former residuals were not overwritten."""
        super().undo()
        self.carried, self.earlier, self.again = None, None, set()

    def seconds(self, link: LinkCost) -> float:
        """Return the duration of an all-gather of one row."""
        return link.all_gather(self._mine.words.nbytes)

    def stepped(self) -> None:
        """Note that a new step begins: all that ``.grad`` then holds counts as new."""
        self.carried = None

    @property
    def _mine(self) -> Payload:
        return self.rows[self.group.rank]

    def _factor(self, indices: Tensor) -> Tensor | float:
        """Return the factor from units of the residual to the gradient's: one, or one per entry."""
        factors = [self.units.scales[name].to_grad for name in self.names]
        if len(set(factors)) == 1:
            return factors[0]
        owner = torch.bucketize(indices, self.ends, right=True)
        each = torch.tensor(factors, dtype=self.dtype, device="cpu")
        return each.to(indices.device, non_blocking=True)[owner]

    def _bounded(self, values: Tensor) -> Tensor:
        """Leave what a float16 gradient cannot hold for the next steps, unless it is infinite."""
        if not self.is_bounded:
            return values
        return torch.where(values.isfinite(), values.clamp(-self.most, self.most), values)

    def _spread(self, whole: Tensor) -> None:
        # Row after row: one call for all of them would add equal indices in any order on a GPU,
        # and ranks would differ by rounding.
        for row in self.rows:
            whole.index_add_(0, row.indices.to(whole.device), row.read(whole))

    def _new_part(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Return what was added to ``.grad`` since the last exchange's result was put there.

        That result is part of the next one, also where this rank's gradient does not count.
        """
        if self.earlier is None:
            # The rows of the last exchange: ours is overwritten when this message is launched.
            self.earlier = self.carried or Flat.of(self.site.parameters, self.names, self.dtype)
            self._spread(self.earlier.whole)
        self.again.add(name)
        return None if grad is None else grad - self.earlier.views[name]


def _lay_out(site: Site, blocks: Sequence[tuple[Sequence[str], int]]) -> list[tuple[int, int, int]]:
    """Return where blocks start and end in a flat tensor, and how many entries each sends."""
    laid, start = [], 0
    for names, k in blocks:
        end = start + sum(site.parameters[name].numel() for name in names)
        laid.append((start, end, k))
        start = end
    if start > _LIMIT:
        raise ValueError(
            f"{start} entries compete in one message, and its indices are int32; use a smaller "
            "message_mb, or lags() instead of slgs()"
        )
    return laid


def _remove(flat: Tensor, indices: Tensor, factor: Tensor | float) -> Tensor:
    """Extract entries; those whose factor is 0, at a learning rate of 0, stay in ``flat``."""
    values = extract(flat, indices)
    if isinstance(factor, Tensor):
        flat.index_copy_(0, indices, torch.where(factor == 0, values, 0.0))
    elif factor == 0:
        flat.index_copy_(0, indices, values)
    return values


def _add_back(flat: Tensor, indices: Tensor, lost: Tensor, factor: Tensor | float) -> None:
    """Add what rounding has taken, in units of the gradient; where factor is 0 nothing was sent."""
    if isinstance(factor, Tensor):
        flat.index_add_(0, indices, torch.where(factor == 0, 0.0, lost / factor))
    elif factor:
        flat.index_add_(0, indices, lost, alpha=1 / factor)
