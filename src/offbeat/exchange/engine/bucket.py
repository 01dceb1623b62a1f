"""Buckets: gradients that are exchanged together, and the message of those that are dense."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.exchange.engine.call_number import CallNumber
from offbeat.exchange.engine.dot_grad import gradient_of, put, require_plain
from offbeat.exchange.engine.flat import Flat
from offbeat.exchange.engine.message import Message
from offbeat.functional import accumulation_dtype, pack, runs_within
from offbeat.platform.device import wait_for_stream
from offbeat.transport.collectives import all_reduce, mean, reduce
from offbeat.transport.group import Group, message_device
from offbeat.transport.handle import Handle

Item = TypeVar("Item", bound=Hashable)

BUCKET = 25 * 2**20  # bytes at most, as in torch's DistributedDataParallel
FIRST_BUCKET = 2**20  # bytes; small, so that the first exchange starts early in backward
MESSAGES = 8  # at least, if they hold 1 MiB: one of most of the model would not overlap


def capacity(total: int, limit: int) -> int:
    """Return the bytes of a bucket for ``total`` bytes in buckets of at most ``limit``.

    >>> capacity(2**30, 25 * 2**20) == 25 * 2**20, capacity(2**24, 25 * 2**20) == 2**21
    (True, True)
    """
    return min(limit, max(FIRST_BUCKET, total // MESSAGES))


def in_buckets(
    sizes: Mapping[Item, int], kinds: Mapping[Item, object], limit: int
) -> list[list[Item]]:
    """Divide items, in their order, into buckets of one kind and at most ``limit`` bytes."""
    buckets = []
    for kind in dict.fromkeys(kinds[item] for item in sizes):
        items = [item for item in sizes if kinds[item] == kind]
        held = [sizes[item] for item in items]
        most = capacity(sum(held), limit)
        runs = runs_within(held, most, min(FIRST_BUCKET, most))
        buckets += [[items[index] for index in run] for run in runs]
    return buckets


@final
class Bucket(Message):
    """Gradients that are averaged as one message, followed by one flag for each and a call number.

    The mean is for all members, or for the member ``owner`` alone. Gradients are sent in the dtype
    ``narrow``, if that is smaller than theirs.
    """

    def __init__(
        self,
        site: Site,
        group: Group,
        names: Sequence[str],
        narrow: torch.dtype | None = None,
        owner: int | None = None,
    ) -> None:
        super().__init__(names)
        self.site, self.group, self.owner = site, group, owner
        parameters = [site.parameters[name] for name in names]
        # A reduction to one member rounds at every hop: not to 16 bits, inside a node.
        dtype = parameters[0].dtype if owner is None else accumulation_dtype(parameters[0].dtype)
        if narrow is not None and dtype.itemsize > narrow.itemsize:
            dtype = narrow
        home = parameters[0].device
        device = message_device(group, home)
        # Where messages lie on the host, the accelerator divides: that pass costs it nothing.
        is_divided = dtype.itemsize > 2  # not by mean(), which sums in float32
        self.divides_at_home = is_divided and device != home and parameters[0].dtype == dtype
        self.memory = Flat.of(site.parameters, names, dtype, device, len(names) + 1)
        self.call_number = CallNumber(group, self.memory.rest)
        self.is_marked = True  # with the call number, which is compared
        self.is_weighed = False  # before it is sent: all members' shares are equal
        self.is_of_another = owner not in (None, group.rank)
        self.handle: Handle | None = None
        self.given: dict[str, Tensor] = {}  # means of this step, to the owner
        if self.is_of_another:
            self.memory.release()

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
        """One flag for each gradient; not 0 after the exchange: some rank has it."""
        return self.memory.rest[:-1]

    def launch(self) -> None:
        """Copy the gradients in, and launch their mean."""
        self.fill()
        self.send()

    def fill(self, *, is_weighed: bool = False) -> None:
        """Copy the gradients in; where another rank owns them, those in ``.grad`` are dropped.

        ``is_weighed``: the caller multiplies them by this rank's weight before :meth:`send`.
        """
        self.is_weighed = is_weighed
        # An elastic exchange must not overwrite the gradient before it has committed.
        self.memory = self.memory.unless_kept(self.site.registered, self.site.is_elastic)
        self.memory.restore()
        self.flags.fill_(1)
        views, grads, weighs = list[Tensor](), list[Tensor](), self.site.factor > 0
        for index, (name, view) in enumerate(self.views.items()):
            grad = gradient_of(self.site.registered[name]) if weighs else None
            if grad is None:
                view.zero_()
                self.flags[index] = 0
            else:
                require_plain(self.group, name, grad)
                if grad is self.given.get(name):
                    raise self.group.detector.report_error(_twice(name))
                views.append(view)
                grads.append(grad)
        self._copy_in(views, grads)
        if self.is_of_another:
            for name in self.names:
                self.site.registered[name].grad = None
        if self.is_marked:
            self.call_number.write(self.memory.rest[-1:])

    def send(self) -> None:
        """Launch the mean over the group."""
        if self.buffer.dtype.itemsize > 2:
            is_divided = self.divides_at_home and not self.is_weighed
            (self.memory.rest if is_divided else self.buffer).mul_(self._share)
        if self.owner is not None:
            self.handle = reduce(self.buffer, self.owner, self.group)
        elif self.buffer.dtype.itemsize > 2:
            self.handle = all_reduce(self.buffer, self.group)
        else:  # summed in float32 and divided there
            self.handle = mean(self.buffer, self.group, shares=self._shares)

    def wait(self) -> bool:
        """Wait for the mean, and compare the calls; no value is checked."""
        self._receive()
        if self.is_marked and not self.is_of_another:
            self.call_number.read(self.memory.rest[-1:])
        return True

    def release(self) -> None:
        """Give the memory back once the owner has received what it is to add; do not wait."""
        if self.is_of_another and self.handle is not None and self.handle.is_complete():
            self._receive()

    def commit(self) -> None:
        """Put the bucket into ``.grad``, except where no rank has a gradient."""
        if self.is_of_another:
            return
        # Flags are read only where this rank has no gradient: on a GPU each read is a wait.
        weighs = self.site.factor > 0
        for index, (name, view) in enumerate(self.views.items()):
            parameter = self.site.registered[name]
            if (weighs and gradient_of(parameter) is not None) or self.flags[index]:
                put(parameter, view)
                if self.owner is not None and parameter.grad is not None:
                    self.given[name] = parameter.grad
            elif not weighs:
                parameter.grad = None

    def stepped(self) -> None:
        """Forget the means that the owner has used."""
        self.given.clear()

    @property
    def _shares(self) -> tuple[float, ...] | None:
        return None if self.is_weighed else self.site.shares

    @property
    def _share(self) -> float:
        shares = self._shares
        return 1.0 / self.group.size if shares is None else shares[self.group.rank]

    def _copy_in(self, views: list[Tensor], grads: list[Tensor]) -> None:
        if self.divides_at_home and not self.is_weighed:
            grads = [grad * self._share for grad in grads]
        pack(views, grads, non_blocking=True)
        if grads and self.buffer.device != grads[0].device:  # Gloo does not wait for streams
            wait_for_stream(grads[0].device)

    def _receive(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
            if self.is_of_another:
                self.memory.release()


def _twice(name: str) -> ValueError:
    return ValueError(
        f"parameter {name!r}: a second backward before step() adds to a mean that its owner alone "
        "has (partition=True); call replica.set_requires_sync(False) before all but the last one"
    )
