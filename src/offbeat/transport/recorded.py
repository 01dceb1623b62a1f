"""The recorded transport: groups that send nothing, and note what a real exchange would send.

An exchange that is bound to a site over recorded groups runs as one rank of a world of any size,
without the others: every launch and every wait becomes an :class:`Event`, and counters of bytes
advance as over sockets. What arrives is what this rank sends, as if all members were alike.
Tensors may be on the device "meta", so that a model takes no memory and no pass over it any time;
:class:`WithoutValues` answers what is asked of their values.
"""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast, final

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.liveness.failure import NoHeartbeat
from offbeat.transport.group import Group
from offbeat.transport.meter import Meter
from offbeat.transport.world import Axis, World

SMALL = 64  # values of the host that are kept where they would go to the device "meta"
Kind = Literal[
    "all_reduce", "all_gather", "reduce", "broadcast", "send", "receive", "wait", "job", "pass"
]  # fmt: skip


class Event(NamedTuple):
    """What one rank does at one moment.

    Attributes:
        kind: a launch, or the "wait" for one; a "job" runs its ``parts`` in a thread; a "pass"
            reads and writes memory.
        axis: that of the group.
        nbytes: of this rank's part; of a pass, read and written; 0 for a wait.
        peer: the other member of a message, the root of a reduce or a broadcast.
        number: of the launch, which its wait repeats.
        parts: the events of a job.
    """

    kind: Kind
    axis: Axis
    nbytes: int = 0
    peer: int = 0
    number: int = 0
    parts: "tuple[Event, ...]" = ()


@final
@dataclass(eq=False)
class RecordedLinks:
    """Opens recorded groups for one rank of ``world``, as :class:`Links` opens real ones.

    ``events`` are those of all groups in the order of this rank's calls, and ``meter`` counts the
    bytes as on a real replica.
    """

    world: World
    meter: Meter = field(default_factory=Meter)
    events: list[Event] = field(default_factory=list)
    launches: int = 0

    def open(self, axis: Axis, peers: Collection[int] | None = None) -> Group | None:
        """Return a group over ``axis``; None where this rank would be alone."""
        members = self.world.members(axis, self.world.local_rank)
        if len(members) < 2:
            return None
        own = members.index(self.world.rank)
        silent = cast(Any, _Silent(own, len(members), axis, self))
        detector = NoHeartbeat(self.world.rank, members)
        return _RecordedGroup(silent, members, axis, detector, self.meter)

    def launched(
        self,
        kind: Kind,
        axis: Axis,
        tensor: Tensor,
        peer: int = 0,
        arrive: Callable[[], object] | None = None,
    ) -> Work:
        """Note a launch; return a work that is done, and calls ``arrive`` when it is waited for."""
        self.launches += 1
        self.events.append(Event(kind, axis, tensor.nbytes, peer, self.launches))
        return self.done(axis, arrive)

    def done(self, axis: Axis, arrive: Callable[[], object] | None = None) -> Work:
        """Return a work that is done for the last launch."""
        return cast(Work, _Done(self, Event("wait", axis, number=self.launches), arrive))

    def run(self, axis: Axis, job: Callable[[], object]) -> "_Done":
        """Run a job at once; return a future whose result is a wait."""
        self.launches += 1
        number = self.launches
        with self.apart() as parts:
            job()
        self.events.append(Event("job", axis, number=number, parts=tuple(parts)))
        return _Done(self, Event("wait", axis, number=number))

    @contextmanager
    def apart(self) -> Iterator[list[Event]]:
        """Collect the events inside the block in a list of their own."""
        outside, self.events = self.events, []
        try:
            yield self.events
        finally:
            self.events = outside


@final
class WithoutValues(TorchDispatchMode):
    """Answers for tensors on the device "meta": all numbers are finite, and 0.

    Inside the context, code that looks at values takes the way of a healthy run. Passes over
    memory become events of ``links``.
    """

    def __init__(self, links: RecordedLinks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._links = links

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace the operations that read values."""
        kwargs, name = kwargs or {}, func._schema.name
        first = next(_tensors(args), None)
        first = first if first is not None and first.is_meta else None
        if name == "aten::copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0].zero_()
        if name == "aten::_foreach_copy_" and args[1][0].is_meta and not args[0][0].is_meta:
            torch._foreach_zero_(args[0])
            return None
        if first is None:
            if name == "aten::_to_copy" and args[0].numel() <= SMALL:
                kwargs = {**kwargs, "device": "cpu"}  # a header keeps its values
            return func(*args, **kwargs)
        if name == "aten::_local_scalar_dense":
            return torch.zeros((), dtype=first.dtype, device="cpu").item()
        if name == "aten::all" and len(args) == 1:
            return torch.ones((), dtype=torch.bool, device="cpu")
        if name == "aten::_to_copy" and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype, device="cpu")
        return self._counted(func, args, kwargs)

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func``, and note the bytes that it reads and writes unless it returns views."""
        result = func(*args, **kwargs)
        if not func.is_view:
            is_copy = func._schema.name.endswith("copy_")  # reads nothing of what it overwrites
            touched = _tensors((args, kwargs, None if is_copy else result))
            nbytes = sum(tensor.nbytes for tensor in touched)
            self._links.events.append(Event("pass", "world", nbytes))
        return result


def _tensors(found: object) -> Iterator[Tensor]:
    """Yield the tensors of the arguments of an operation: torch's own pytree takes as long as it.

    They are in lists and tuples at most.
    """
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _tensors(part)
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))


@dataclass(eq=False)
class _RecordedGroup(Group):
    """A group whose messages may lie on any device, and whose thread is the caller's."""

    def backend(self, device: torch.device | str) -> str:
        """Return a name for every device: no message is staged on the host."""
        return "gloo" if torch.device(device).type == "cpu" else "recorded"

    @cached_property
    def is_far(self) -> bool:
        """False: messages are recorded hop by hop, wherever this process is connected to."""
        return False

    @cached_property
    def connections(self) -> int:
        """One: messages are recorded as a whole."""
        return 1

    @cached_property
    def lane(self) -> Any:
        """What runs jobs at once, as events of their own."""
        return _AtOnce(self)

    @cached_property
    def waiter(self) -> Any:
        """What waits at once."""
        return _Waiter()


class _Waiter:
    """Stands for the :class:`Lane` that waits for messages."""

    def submit(self, job: Callable[..., None], *args: object) -> "Future[None]":
        job(*args)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _AtOnce:
    """Stands for :class:`Lane`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def submit(self, job: Callable[..., object], *args: object) -> Any:
        silent, axis = cast(Any, self._group.process_group), self._group.axis
        return silent.links.run(axis, lambda: job(*args))


class _Silent:
    """The process group of a recorded group."""

    def __init__(self, rank: int, size: int, axis: Axis, links: RecordedLinks) -> None:
        self.links, self._axis, self._rank, self._size = links, axis, rank, size
        self._sent: dict[int, Tensor] = {}  # the last message of each size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[Tensor], options: object) -> Work:
        return self._sum("all_reduce", tensors[0])

    def reduce(self, tensors: list[Tensor], options: Any) -> Work:
        return self._sum("reduce", tensors[0], options.rootRank)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        return self.links.launched("broadcast", self._axis, tensors[0], options.rootRank)

    def _sum(self, kind: Kind, tensor: Tensor, root: int = 0) -> Work:
        """Add up equal terms."""
        with self.links.apart():
            tensor.mul_(self._size)
        return self.links.launched(kind, self._axis, tensor, root)

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> Work:
        with self.links.apart():
            out.view(self._size, -1).copy_(tensor.clone().view(1, -1))  # it may be a part of out
        return self.links.launched("all_gather", self._axis, tensor)

    def alltoall_base(self, out: Tensor, tensor: Tensor, *splits: object) -> Work:
        """Record what sends the same to all."""
        return self._allgather_base(out, tensor[: len(tensor) // self._size])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Keep the message for the next receive of its size."""
        self._sent[tensors[0].nbytes] = tensors[0]
        return self.links.launched("send", self._axis, tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Return a work whose wait fills the tensor with a message of this rank's, or with 0."""
        return self.links.launched(
            "receive", self._axis, tensors[0], peer, lambda: self._arrive(tensors[0])
        )

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin messages with one work for all."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return self.links.done(self._axis)

    def _arrive(self, tensor: Tensor) -> None:
        sent = self._sent.get(tensor.nbytes)
        with self.links.apart():  # zeros, not what the memory held: an exchange may look at it
            tensor.zero_() if sent is None else tensor.copy_(sent)


@dataclass(eq=False)
class _Done:
    """A work, or the future of a job, that is done, and notes that it is waited for."""

    links: RecordedLinks
    event: Event
    arrive: Callable[[], object] | None = None

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> None:
        self.links.events.append(self.event)
        if self.arrive is not None:
            self.arrive()

    done, result = is_completed, wait
