"""Messages of the largest entries of several layers, and their residuals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.comm.collectives import all_gather
from offbeat.comm.group import Group, message_device
from offbeat.comm.handle import Handle
from offbeat.exchange import Site
from offbeat.functional import LinkCost, accumulation_dtype, extract
from offbeat.functional.sixteen_bits import Sixteen
from offbeat.gradients.call_number import number_of, require_same_call
from offbeat.gradients.dot_grad import gradient_of, put, require_plain
from offbeat.gradients.feedback import Feedback, FlatFeedback, LayerFeedback
from offbeat.gradients.flat import Flat
from offbeat.gradients.message import Message, Scales
from offbeat.gradients.top_k.correction import Correction
from offbeat.gradients.top_k.payload import Payload, PayloadFormat
from offbeat.kernels.dispatch import BlockSelect

_LIMIT = 2**31 - 1  # entries that an int32 index can name


class Range(NamedTuple):
    """Range of a flat tensor of which ``k`` entries are selected: a layer, or the whole model."""

    start: int
    end: int
    k: int


class SparseMessage(Message):
    """Values and int32 indices of the largest entries, and one flag for each parameter.

    Three flat tensors: the former residuals, ``residual + gradient``, of which the rest becomes
    the new residual, and what all ranks have sent, which becomes ``.grad``. So :meth:`undo` needs
    no copy. Two more once a step has several exchanges.

    Args:
        site: the parameters.
        group: the members that exchange.
        blocks: runs of parameters, and how many entries are sent of each run.
        select: returns indices into a flat tensor, given the tensor and the ranges of the blocks.
        correction: clipping and momentum correction.
        wire: the format of values of 16 bits, None for full precision.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        blocks: Sequence[tuple[Sequence[str], int]],
        *,
        select: BlockSelect,
        correction: Correction,
        wire: Sixteen | None = None,
    ) -> None:
        self.site, self.group = site, group
        self.correction = correction
        self.names = [name for names, _ in blocks for name in names]
        self.select = select
        own = site.parameters[self.names[0]]
        dtype = accumulation_dtype(own.dtype)
        self.residual: FlatFeedback = FlatFeedback(site, self.names, dtype)
        self.speed = FlatFeedback(site, self.names, dtype) if correction.momentum else None
        self.velocity: Feedback = self.speed or LayerFeedback({})
        self.grads = Flat.of(site, self.names, dtype)
        self.blocks = _lay_out(site, blocks)
        self.place = {name: index for index, name in enumerate(self.names)}
        sizes = torch.tensor([site.parameters[name].numel() for name in self.names], device="cpu")
        self.ends = sizes.cumsum(0).to(self.grads.whole.device)
        count = sum(block.k for block in self.blocks)
        form = PayloadFormat(count, len(self.names), own.dtype, wire)
        self.rows = form.allocate(group.size, message_device(group, own.device))
        self.handle: Handle | None = None
        self.mine_has = [False] * len(self.names)  # written in one go: an element costs as much
        self.had: dict[str, bool] = {}  # whether any rank had this gradient
        # A further backward before the step: what .grad held before it, and of the exchanges
        # before the last one.
        self.earlier: Flat | None = None
        self.carried: Flat | None = None
        self.again: set[str] = set()
        self.missing = set(self.names)

    def add(self, name: str, scales: Scales, *, continues: bool) -> None:
        """Add the gradient to the residual."""
        grad, scale = gradient_of(self.site.registered[name]), scales[name]
        into, residual = self.residual.next.views[name], self.residual.latest[name]
        if grad is not None:
            require_plain(self.group, name, grad)
            if continues:
                grad = self._new_part(name, grad)
            grad = self.correction.clipped(grad, scale.loss)
        self.mine_has[self.place[name]] = grad is not None
        if self.speed is not None:  # u = m u + g, and u is what is added up
            now = self.speed.next.views[name]
            torch.mul(self.speed.latest[name], self.correction.momentum, out=now)
            if grad is not None:
                now.add_(grad, alpha=1 / scale.loss)
            torch.add(residual, now, alpha=scale.rate, out=into)
        elif grad is None:
            into.copy_(residual)
        else:
            torch.add(residual, grad, alpha=scale.enter, out=into)
        self.missing.discard(name)

    def launch(self, scales: Scales) -> None:
        """Select and launch; a value that is not finite is selected, so only these are checked."""
        # All blocks at once, not each when its gradient is ready and still in the cache: between
        # two matrix products the code is not in the cache and its branches are mispredicted.
        acc, mine = self.residual.next.whole, self._mine
        indices = self.select(acc, self.blocks)
        factor = self._factor(indices, scales)
        values = _remove(acc, indices, factor)
        if self.speed is not None and self.correction.masking:
            _remove(self.speed.next.whole, indices, factor)
        sent = mine.put(values.mul_(factor / self.group.size))
        if mine.wire is not None:
            _add_back(acc, indices, (values - sent).mul_(self.group.size), factor)
        mine.indices.copy_(indices)
        flags = [*self.mine_has, number_of(self.group)]
        said = torch.tensor(flags, dtype=torch.int32, device="cpu")
        mine.flags[:-1].copy_(said, non_blocking=True)
        mine.flags[-1:] = mine.values.isfinite().all().logical_not_()
        self.handle = all_gather(self.rows.whole, mine.words, self.group)

    def wait(self) -> bool:
        """Wait for all members' rows; False if a flag says that one is not finite."""
        assert self.handle is not None, "every message was launched"
        self.handle.wait()
        self.handle, self.missing = None, set(self.names)
        flags = torch.stack([row.flags for row in self.rows.parts])
        require_same_call(self.group, number_of(self.group), *flags[:, -2].tolist())
        *had, _, broken = flags.amax(0).tolist()
        self.had = dict(zip(self.names, map(bool, had), strict=True))
        return not broken

    def commit(self) -> None:
        """Spread all rows into ``.grad``, and keep what was not sent."""
        unused = [name for name, had in self.had.items() if not had]
        for feedback in (self.residual, *([self.speed] if self.speed else [])):
            feedback.skip(unused)
            feedback.commit()
        self.grads = self.grads.unless_kept(self.site.registered)
        self._spread(self.grads.whole.zero_())
        if self.earlier is not None:
            for name, earlier in self.earlier.views.items():
                earlier.mul_(name in self.again)
            self.grads.whole.add_(self.earlier.whole)
        self.carried = self.earlier
        self._hand_out()

    def undo(self) -> None:
        """Set every ``.grad`` to NaN; the former residuals were not overwritten."""
        self.grads = self.grads.unless_kept(self.site.registered)
        self.grads.whole.fill_(math.nan)
        self.carried = None
        self._hand_out()

    def seconds(self, link: LinkCost) -> float:
        """Return the duration of an all-gather of one row."""
        return link.all_gather(self._mine.words.nbytes)

    def stepped(self) -> None:
        """Note that a new step begins: all that ``.grad`` then holds counts as new."""
        self.carried = None

    @property
    def _mine(self) -> Payload:
        return self.rows.parts[self.group.rank]

    def _factor(self, indices: Tensor, scales: Scales) -> Tensor | float:
        """Return the factor from units of the residual to the gradient's: one, or one per entry."""
        factors = [scales[name].leave for name in self.names]
        if len(set(factors)) == 1:
            return factors[0]
        owner = torch.bucketize(indices, self.ends, right=True)
        each = torch.tensor(factors, dtype=self.grads.whole.dtype, device="cpu")
        return each.to(indices.device, non_blocking=True)[owner]

    def _spread(self, whole: Tensor) -> None:
        # Row after row: one call for all of them would add equal indices in any order on a GPU,
        # and ranks would differ by rounding.
        for row in self.rows.parts:
            whole.index_add_(0, row.indices.to(whole.device), row.read(whole))

    def _new_part(self, name: str, grad: Tensor) -> Tensor:
        """Return what was added to ``.grad`` since the last exchange's result was put there."""
        if self.earlier is None:
            # The rows of the last exchange: ours is overwritten when this message is launched.
            self.earlier = self.carried or Flat.of(self.site, self.names, self.grads.whole.dtype)
            self._spread(self.earlier.whole)
        self.again.add(name)
        return grad - self.earlier.views[name]

    def _hand_out(self) -> None:
        self.earlier, self.again = None, set()
        for name, had in self.had.items():
            if had:
                put(self.site.registered[name], self.grads.views[name])


def _lay_out(site: Site, blocks: Sequence[tuple[Sequence[str], int]]) -> list[Range]:
    laid, start = [], 0
    for names, k in blocks:
        end = start + sum(site.parameters[name].numel() for name in names)
        laid.append(Range(start, end, k))
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
