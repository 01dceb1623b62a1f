"""One replica for each optimizer of a model, for frameworks that train with several."""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.elastic.portable import put_together, room_for, taken_apart
from offbeat.exchange import Algorithm
from offbeat.integrations.split_by_optimizer import exchanging, parts_of
from offbeat.replica.replica import Replica
from offbeat.replica.replicate import replicate
from offbeat.replica.saving.per_rank import Stateful
from offbeat.replica.uneven import Uneven
from offbeat.transport.world import World

Result = TypeVar("Result")


@contextmanager
def consensus(replicas: Sequence[Replica]) -> Iterator[None]:
    """Show the average models inside the block; all ranks enter."""
    with ExitStack() as stack:
        for replica in replicas:
            stack.enter_context(replica.consensus())
        yield


def written(replica: Replica, is_first: Callable[[], bool], write: Callable[[], Result]) -> Result:
    """Return what ``write`` does, in which the first rank writes a checkpoint; all ranks call.

    Where that rank is lost meanwhile, the next first one writes: what the others add to the
    checkpoint would make one without a model seem complete.
    """
    while True:
        writes, error = is_first(), None
        try:
            result = write()
        except Exception as raised:  # the others wait for this rank
            error = raised
        said = replica.gather("written" if writes or error else "")
        if error is not None:
            raise error
        if any(said):
            return result


class Replicas:
    """The replicas of a model, one for each of its optimizers; none before :meth:`attach`.

    An optimizer that trains nothing that ranks exchange has none. An elastic run has one optimizer.

    Attributes:
        is_behind: whether this rank has joined a run, whose loop it enters inside a step that the
            others have made: the next :meth:`step` does nothing.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        mesh: World | None = None,
        elastic: bool = False,
        weighted: bool = False,
    ) -> None:
        """Prepare to replicate as :func:`offbeat.replicate` does."""
        self.algorithm, self.mesh = algorithm, mesh
        self.elastic, self.weighted = elastic, weighted
        self._uneven: list[Uneven[Any]] = []
        self._batch, self.is_behind = -1, False  # on which training has begun
        self._of: dict[Optimizer, Replica] = {}
        self._optimizers: list[Optimizer] = []
        self._scaler: torch.amp.GradScaler | None = None
        self._measured = 0, 0.0, 0.0  # steps, seconds, bytes at the last measures()
        self._loss: Tensor | float = 0.0  # of the micro-batches since the last step

    def attach(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Replicate what each optimizer trains; all ranks call.

        Raises ``ValueError`` if two optimizers share a parameter, if an elastic run has several,
        and as :func:`offbeat.replicate`.
        """
        self.detach()
        self._optimizers, self._scaler = list(optimizers), scaler
        replicated = exchanging(model, optimizers) or self._optimizers[:1]
        if self.elastic and len(replicated) > 1:
            raise ValueError(
                f"elastic=True with {len(replicated)} optimizers: a rank would join the replica of "
                "each in another step; use one optimizer with several parameter groups"
            )
        for part, optimizer in zip(parts_of(model, replicated), replicated, strict=True):
            self._of[optimizer] = replicate(
                part,
                self.algorithm,
                mesh=self.mesh,
                optimizer=optimizer,
                scaler=scaler,
                elastic=self.elastic,
                weighted=self.weighted,
            )
        self.is_behind = any(replica.joined for replica in self.each)

    @property
    def each(self) -> list[Replica]:
        """The replicas, in the order of their optimizers."""
        return [*self._of.values()]

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, divided by their number, to that of the coming step."""
        self._loss = self._loss + loss.detach()

    def step(self, optimizer: Optimizer) -> None:
        """Exchange after a step of ``optimizer``, also if a scaler has skipped it."""
        loss, self._loss = self._loss, 0.0
        if self.is_behind:
            self.is_behind = False
        elif (replica := self._of.get(optimizer)) is not None:
            replica.report_loss(loss)
            replica.step()

    def steps_of_first(self, optimizer: Optimizer) -> int | None:
        """Return the steps of the first replica if they are those of ``optimizer``, or None."""
        first = self.each[0]
        return first.steps if self._of.get(optimizer) is first else None

    def gather(self, value: Any) -> list[Any]:
        """Return what every living rank passes, the first rank's first; all ranks call.

        That of this rank alone before :meth:`attach`, and while it is behind: then the others have
        made this call already. Raises ``ValueError`` for other values than numbers, text, tensors,
        and lists, tuples and dicts of these.
        """
        if not self.each or self.is_behind:
            return [value]
        return [_decoded(text) for text in self.each[0].gather(_encoded(value))]

    def set_weight(self, samples: float) -> None:
        """Say how many samples the coming step of this rank stands for."""
        for replica in self.each:
            replica.set_weight(samples)

    def uneven(self, batches: Iterable[Any], filler: Any = None) -> Uneven[Any]:
        """Return an iterable that ends on all ranks together; :meth:`begin_batch` follows it."""
        if not self.each:
            raise ValueError("uneven() was called outside of fit(); call it in train_dataloader()")
        first, parameters = self.each[0], [p for r in self.each for p in r.model.parameters()]

        def run_out(is_out: bool) -> None:
            for replica in self.each:
                replica.weighting.run_out(is_out)

        given = batches, filler, parameters, run_out, first.gather
        found = Uneven(*given, lambda: first.weighting.place(first.steps), is_ahead=True)
        self._uneven = [found]
        return found

    def begin_batch(self, number: int) -> None:
        """Note that training goes on to this batch; a closure may train on it several times."""
        if number != self._batch:
            self._batch = number
            for uneven in self._uneven:
                uneven.begin()

    def measures(self) -> dict[str, float]:
        """Return ``seconds_stalled`` and ``mb_sent`` (10^6 bytes) per step since the last call.

        They are sums over the replicas, divided by the steps of the first.
        """
        totals = [replica.stats()["total"] for replica in self.each]
        stalled = sum(total["seconds_stalled"] for total in totals)
        now = self.each[0].steps, stalled, sum(total["bytes_sent"] for total in totals)
        steps, stalled, sent = (b - a for a, b in zip(self._measured, now, strict=True))
        self._measured = now
        return {"seconds_stalled": stalled / max(steps, 1), "mb_sent": sent / max(steps, 1) / 1e6}

    def finish(self) -> None:
        """Set all ranks to the average."""
        while self._uneven:
            self._uneven.pop().end()
        for replica in self.each:
            replica.finish()

    def detach(self) -> None:
        """Remove what was attached to the model."""
        for replica in self.each:
            replica.detach()
        self._of, self._optimizers, self._scaler = {}, [], None
        self._measured, self._loss = (0, 0.0, 0.0), 0.0
        self.is_behind = False

    def parts(self) -> dict[str, Stateful]:
        """Return what a rank saves by itself: optimizers, replicas and loss scale."""
        parts: dict[str, Stateful] = {f"optimizer{i}": o for i, o in enumerate(self._optimizers)}
        parts |= {f"replica{i}": replica for i, replica in enumerate(self.each)}
        return parts | ({"scaler": self._scaler} if self._scaler is not None else {})


def _encoded(value: Any) -> str:
    text, tensors = taken_apart(value)
    flat = [tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return json.dumps([text, [base64.b64encode(bits.numpy().tobytes()).decode() for bits in flat]])


def _decoded(word: str) -> Any:
    text, parts = json.loads(word)
    rooms = room_for(text)
    for room, part in zip(rooms, parts, strict=True):
        if part:
            bits = torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8)
            room.view(-1).view(torch.uint8).copy_(bits)
    return put_together(text, rooms)


def share_of(replica: Replica, shares: int) -> int:
    """Return which of ``shares`` shares of the data is this rank's.

    The first ranks have that of their number. One that has joined gets the first that no other has.

    >>> from types import SimpleNamespace as Stub  # for the replica of a rank that has joined
    >>> lost, joined = [{"rank": 1, "step": 5}], [{"rank": 3, "step": 8}]
    >>> share_of(Stub(lost=lost, joined=joined, world=Stub(rank=3)), shares=3)
    1
    """
    of = {rank: rank for rank in range(shares)}
    changes = [(loss["step"], 0, loss["rank"]) for loss in replica.lost]
    changes += [(join["step"], 1, join["rank"]) for join in replica.joined]
    for _, joins, rank in sorted(changes):
        if joins:
            free = {*range(shares)} - {*of.values()}
            of[rank] = min(free, default=replica.world.rank % shares)
        else:
            of.pop(rank, None)
    return of.get(replica.world.rank, replica.world.rank % shares)
