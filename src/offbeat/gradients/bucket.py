"""Buckets of dense gradients, and the checks that all gradient exchanges share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce, broadcast, mean, reduce
from offbeat.comm.group import Group, message_device
from offbeat.comm.handle import Handle
from offbeat.exchange import Site
from offbeat.functional import accumulation_dtype, pack
from offbeat.gradients.call_number import CallNumber
from offbeat.gradients.dot_grad import gradient_of, put, require_plain
from offbeat.gradients.flat import Flat

BUCKET = 25 * 2**20  # bytes at most, as in torch's DistributedDataParallel
FIRST_BUCKET = 2**20  # bytes; small, so that the first exchange starts early in backward
MESSAGES = 8  # at least, if they hold 1 MiB: one of most of the model would not overlap


def capacity(total: int, limit: int) -> int:
    """Return the bytes of a bucket for ``total`` bytes in buckets of at most ``limit``.

    >>> capacity(2**30, 25 * 2**20) == 25 * 2**20, capacity(2**24, 25 * 2**20) == 2**21
    (True, True)
    """
    return min(limit, max(FIRST_BUCKET, total // MESSAGES))


@dataclass(eq=False)
class Bucket:
    """Gradients that are averaged as one message, followed by one flag for each and a call number.

    A flag that is not 0 after the exchange means that some rank has the gradient. The mean is for
    all members, or for the member ``owner`` alone.
    """

    site: Site
    group: Group
    memory: Flat
    call_number: CallNumber
    missing: set[str] = field(default_factory=set)
    owner: int | None = None
    handle: Handle | None = None
    given: dict[str, Tensor] = field(default_factory=dict)  # means of this step, to the owner

    @classmethod
    def of(
        cls,
        site: Site,
        group: Group,
        names: Sequence[str],
        narrow: torch.dtype | None = None,
        owner: int | None = None,
    ) -> "Bucket":
        """Lay out a bucket for ``names``, of their dtype, or of ``narrow`` if that is smaller."""
        parameters = [site.parameters[name] for name in names]
        # A reduction to one member rounds at every hop: not to 16 bits, inside a node.
        dtype = parameters[0].dtype if owner is None else accumulation_dtype(parameters[0].dtype)
        if narrow is not None and dtype.itemsize > narrow.itemsize:
            dtype = narrow
        device = message_device(group, parameters[0].device)
        memory = Flat.of(site, names, dtype, device, len(names) + 1)
        bucket = cls(site, group, memory, CallNumber(group, memory.rest), set(names), owner)
        if bucket._is_of_another:
            memory.release()
        return bucket

    @property
    def buffer(self) -> Tensor:
        """What is sent: gradients and flags, flat."""
        return self.memory.whole

    @property
    def views(self) -> dict[str, Tensor]:
        """The gradients by name, in the shapes of the parameters."""
        return self.memory.views

    @property
    def flags(self) -> Tensor:
        """One flag for each gradient."""
        return self.memory.rest[:-1]

    def fill(self) -> None:
        """Copy the gradients in, with what earlier backwards have accumulated.

        Where another rank owns them, those in ``.grad`` are dropped.
        """
        self.memory = self.memory.unless_kept(self.site.registered)
        self.memory.restore()
        self.flags.fill_(1)
        filled = {}
        for index, (name, view) in enumerate(self.views.items()):
            grad = gradient_of(self.site.registered[name])
            if grad is None:
                view.zero_()
                self.flags[index] = 0
            else:
                require_plain(self.group, name, grad)
                if grad is self.given.get(name):
                    raise self.group.detector.condemn(_twice(name))
                filled[name] = grad
        pack([self.views[name] for name in filled], filled.values())
        if self._is_of_another:
            for name in self.views:
                self.site.registered[name].grad = None

    def mark(self) -> None:
        """Write the call number, after :meth:`fill`; in the first message of a backward."""
        self.call_number.write(self.memory.rest[-1:])

    def check(self) -> None:
        """Compare the number of a message that was marked, after :meth:`wait`."""
        if self.owner in (None, self.group.rank):
            self.call_number.read(self.memory.rest[-1:])

    def send(self) -> None:
        """Launch the mean over the group."""
        if self.owner is not None:
            self.handle = reduce(self.buffer.mul_(1.0 / self.group.size), self.owner, self.group)
        elif self.buffer.dtype.itemsize > 2:
            self.handle = all_reduce(self.buffer.mul_(1.0 / self.group.size), self.group)
        else:  # summed in float32 and divided there
            self.handle = mean(self.buffer, self.group)

    def wait(self) -> None:
        """Wait for the mean, and expect all gradients anew."""
        self._receive()
        self.missing = set(self.views)

    def release(self) -> None:
        """Give the memory back once the owner has received what it is to add; do not wait."""
        if self._is_of_another and self.handle is not None and self.handle.is_complete():
            self._receive()

    def _receive(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
            if self._is_of_another:
                self.memory.release()

    @property
    def _is_of_another(self) -> bool:
        return self.owner not in (None, self.group.rank)

    def hand_out(self) -> None:
        """Put the bucket into ``.grad``, except where no rank has a gradient."""
        if self._is_of_another:
            return
        # Flags are read only where this rank has no gradient: on a GPU each read is a wait.
        for index, (name, view) in enumerate(self.views.items()):
            parameter = self.site.registered[name]
            if gradient_of(parameter) is not None or self.flags[index]:
                put(parameter, view)
                if self.owner is not None and parameter.grad is not None:
                    self.given[name] = parameter.grad


def _twice(name: str) -> ValueError:
    return ValueError(
        f"parameter {name!r}: a second backward before step() adds to a mean that its owner alone "
        "has (partition=True); call replica.set_requires_sync(False) before all but the last one"
    )


def require_first(group: Group, name: str, missing: set[str]) -> None:
    """Raise ``ValueError`` for a second gradient in a backward: the first may have been sent."""
    if name in missing:
        return
    fault = ValueError(
        f"parameter {name!r} got a gradient twice in one backward: it is used more than once, at "
        "least once in a block checkpointed with use_reentrant=True; use use_reentrant=False"
    )
    raise group.detector.condemn(fault)


def agree_on_order(order: Sequence[str], seen: Sequence[str], group: Group) -> list[str]:
    """Return the order in which gradients became ready on rank 0, then the rest of ``order``."""
    names = sorted(order)
    mine = [*dict.fromkeys([*seen, *order])]
    indices = torch.tensor([names.index(name) for name in mine], device=message_device(group))
    broadcast(indices, 0, group).wait()
    return [names[i] for i in indices.tolist()]
