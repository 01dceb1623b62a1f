"""The largest entries of several layers, as one message, and what is left of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.comm.collectives import all_gather
from offbeat.comm.group import Group, message_device
from offbeat.comm.handle import Handle
from offbeat.exchange import Site
from offbeat.functional import LinkCost, extract
from offbeat.gradients.bucket import like, put, require_plain
from offbeat.gradients.top_k.message import Message, Scales
from offbeat.kernels.dispatch import top_k_of_blocks

_LIMIT = 2**31 - 1  # entries that an int32 index can name


class Range(NamedTuple):
    """Where ``k`` entries are chosen in the flat tensors: from a layer, or the whole model."""

    start: int
    end: int
    k: int


@dataclass(eq=False)
class Flat:
    """One flat tensor and its views by parameter."""

    whole: Tensor
    views: dict[str, Tensor]

    @classmethod
    def of(cls, site: Site, names: Sequence[str], dtype: torch.dtype) -> "Flat":
        """Zeros, laid out in the order of ``names``."""
        parameters = [site.parameters[name] for name in names]
        sizes = [parameter.numel() for parameter in parameters]
        whole = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        parts = map(like, whole.split(sizes), parameters)
        # .data: a view counts the writes to its base as its own, and we ask each for its own.
        return cls(whole, {name: part.data for name, part in zip(names, parts, strict=True)})


class SparseMessage(Message):
    """Values and int32 indices of the largest entries, and one flag for each parameter.

    Two flat tensors take turns. One holds the residuals of before while ``residual + gradient``
    is written into the other; when everybody's message is there, what was left in the other is
    the new residual, and the first becomes ``.grad``. So nothing has to be copied to be able to
    go back.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        blocks: Sequence[tuple[Sequence[str], int]],
        *,
        momentum: float = 0.0,
        exact: bool = False,
    ) -> None:
        """Room for ``blocks``, pairs of parameters and how many of their entries are sent."""
        self.site, self.group = site, group
        self.momentum = momentum
        self.names = [name for names, _ in blocks for name in names]
        self.select = top_k_of_blocks(site.parameters[self.names[0]].device, exact)
        dtype = torch.promote_types(site.parameters[self.names[0]].dtype, torch.float32)
        self.old, self.new = (Flat.of(site, self.names, dtype) for _ in range(2))
        pair = [Flat.of(site, self.names, dtype) for _ in range(2)] if momentum else []
        self.speeds = pair  # of before, and of this backward
        self.residual = self.old.views
        self.velocity = self.speeds[0].views if self.speeds else {}
        self.blocks = _lay_out(site, blocks)
        self.place = {name: index for index, name in enumerate(self.names)}
        sizes = torch.tensor([site.parameters[name].numel() for name in self.names])
        self.ends = sizes.cumsum(0).to(self.new.whole.device)
        self.rows = _rows(self)
        self.handle: Handle | None = None
        self.mine_has = [False] * len(self.names)  # written in one go: an element costs as much
        self.had: dict[str, bool] = {}  # whether anybody had this gradient
        self.handed: dict[str, tuple[Tensor, int]] = {}  # what we put into .grad, as we left it
        # A further backward before the step: what .grad held before it, and of the exchanges
        # before the last one.
        self.earlier: Flat | None = None
        self.carried: Flat | None = None
        self.again: set[str] = set()
        self.missing = set(self.names)

    def remember(self, name: str, residual: Tensor | None, velocity: Tensor | None) -> None:
        """Copy them into the flat tensors."""
        if residual is not None:
            self.residual[name].copy_(residual)
        if velocity is not None and self.velocity:
            self.velocity[name].copy_(velocity)

    def add(self, name: str, scales: Scales, *, accumulated: bool) -> None:
        """Add the gradient to the residual."""
        grad, scale = self.site.parameters[name].grad, scales[name]
        into, residual = self.new.views[name], self.old.views[name]
        if grad is not None:
            require_plain(self.group, name, grad)
            grad = self._new_part(name, grad, accumulated)
        self.mine_has[self.place[name]] = grad is not None
        if self.speeds:  # u = m u + g, and u is what is added up
            before, now = (speed.views[name] for speed in self.speeds)
            torch.mul(before, self.momentum, out=now)
            if grad is not None:
                now.add_(grad, alpha=1 / scale.loss)
            torch.add(residual, now, alpha=scale.rate, out=into)
        elif grad is None:
            into.copy_(residual)
        else:
            torch.add(residual, grad, alpha=scale.enter, out=into)
        self.missing.discard(name)

    def launch(self, scales: Scales) -> None:
        """Choose, and send; what is not finite is chosen, so a look at that is enough."""
        # All blocks at once, not each when it is full and still in the cache: between two layers'
        # products neither the code is in the cache nor is its next branch foreseen.
        indices, mine = self.select(self.new.whole, self.blocks), self._mine
        factor = self._factor(indices, scales)
        values = _remove(self.new.whole, indices, factor)
        if self.speeds:  # a sent entry starts anew: its momentum was about older gradients
            _remove(self.speeds[1].whole, indices, factor)
        mine.values.copy_(values.mul_(factor / self.group.size))
        mine.indices.copy_(indices)
        mine.flags[:-1] = torch.tensor(self.mine_has, dtype=torch.int32)
        mine.flags[-1:] = mine.values.isfinite().all().logical_not_()
        self.handle = all_gather(self.rows.whole, mine.words, self.group)

    def wait(self) -> bool:
        """Until all rows are there."""
        assert self.handle is not None, "every message was launched"
        self.handle.wait()
        self.handle, self.missing = None, set(self.names)
        *had, broken = torch.stack([row.flags for row in self.rows.parts]).amax(0).tolist()
        self.had = dict(zip(self.names, map(bool, had), strict=True))
        return not broken

    def commit(self) -> None:
        """The residuals of before have served: their memory becomes the gradients."""
        for name in self._nobody():  # no gradient, no step: its residual waits for the next
            for old, new in ((self.old, self.new), *([tuple(self.speeds)] if self.speeds else [])):
                new.views[name].copy_(old.views[name])
        self.old.whole.zero_()
        self._spread(self.old.whole)
        if self.earlier is not None:
            for name, earlier in self.earlier.views.items():
                earlier.mul_(name in self.again)
            self.old.whole.add_(self.earlier.whole)
        self.carried = self.earlier
        self._hand_out(self.old)
        self.old, self.new = self.new, self.old
        self.residual = self.old.views
        if self.speeds:
            self.speeds.reverse()
            self.velocity = self.speeds[0].views

    def undo(self) -> None:
        """Nothing was written over the residuals of before."""
        self.new.whole.fill_(math.nan)
        self.carried = None
        self._hand_out(self.new)

    def seconds(self, link: LinkCost) -> float:
        """An all-gather of one row."""
        return link.all_gather(self._mine.words.nbytes)

    def stepped(self) -> None:
        """What lies in ``.grad`` now is no longer part of what comes."""
        self.handed.clear()
        self.carried = None

    @property
    def _mine(self) -> "Payload":
        return self.rows.parts[self.group.rank]

    def _nobody(self) -> list[str]:
        return [name for name, had in self.had.items() if not had]

    def _factor(self, indices: Tensor, scales: Scales) -> Tensor | float:
        """From the residual's units to the gradient's: one factor, or one for each entry."""
        factors = [scales[name].leave for name in self.names]
        if len(set(factors)) == 1:
            return factors[0]
        owner = torch.bucketize(indices, self.ends, right=True)
        return torch.tensor(factors, dtype=self.new.whole.dtype, device=indices.device)[owner]

    def _spread(self, whole: Tensor) -> None:
        # Row after row: one call for all of them would add equal indices in any order on a GPU,
        # and ranks would drift apart by rounding.
        for row in self.rows.parts:
            device = whole.device
            whole.index_add_(0, row.indices.to(device), row.values.to(device))

    def _new_part(self, name: str, grad: Tensor, accumulated: bool) -> Tensor:
        """What was added to ``.grad`` since we put the last exchange's result there."""
        last, version = self.handed.pop(name, (None, 0))
        if grad is not last or grad._version != version + accumulated:
            return grad  # made anew, zeroed or clipped since: all of it counts
        if self.earlier is None:
            # The rows of the last exchange: ours is written over when this message leaves.
            self.earlier = self.carried or Flat.of(self.site, self.names, self.new.whole.dtype)
            self._spread(self.earlier.whole)
        self.again.add(name)
        return grad - self.earlier.views[name]

    def _hand_out(self, flat: Flat) -> None:
        self.earlier, self.again = None, set()
        for name, had in self.had.items():
            parameter = self.site.parameters[name]
            if had:
                put(parameter, flat.views[name])
                assert parameter.grad is not None, "it was just put there"
                self.handed[name] = (parameter.grad, parameter.grad._version)


@dataclass(eq=False)
class Payload:
    """One rank's part of a message."""

    words: Tensor  # what follows, as int32
    values: Tensor
    indices: Tensor
    flags: Tensor


@dataclass(eq=False)
class Payloads:
    """Everybody's parts, in one tensor of int32."""

    whole: Tensor
    parts: list[Payload]


def _rows(message: SparseMessage) -> Payloads:
    dtype, count = message.new.whole.dtype, sum(block.k for block in message.blocks)
    words, flags = count * dtype.itemsize // 4, len(message.names) + 1
    length = words + count + flags
    padding = length % 2  # rows of float64 begin at even words
    device = message_device(message.group, message.new.whole.device)
    size = message.group.size * (length + padding)
    whole = torch.zeros(size, dtype=torch.int32, device=device)
    parts = []
    for row in whole.split(length + padding):
        values, indices, row_flags, _ = row.split([words, count, flags, padding])
        parts.append(Payload(row, values.view(dtype), indices, row_flags))
    return Payloads(whole, parts)


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
    """Take entries out, but leave those that a learning rate of 0 does not let go."""
    values = extract(flat, indices)
    if isinstance(factor, Tensor):
        flat.index_copy_(0, indices, torch.where(factor == 0, values, 0.0))
    elif factor == 0:
        flat.index_copy_(0, indices, values)
    return values
