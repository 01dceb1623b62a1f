"""What every framework does with the replicas of a training run."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.comm.world import World
from offbeat.exchange import Algorithm
from offbeat.replica.part import parts_of
from offbeat.replica.per_rank import Stateful, load_per_rank, save_per_rank
from offbeat.replica.replica import Replica
from offbeat.replica.replicate import replicate


class Replicas:
    """The replicas of a model, one for each of its optimizers, with what ranks save beside them.

    Args:
        model: the model, which is not wrapped.
        optimizers: those of torch, not a framework's wrappers.
        algorithm: what a recipe returns.
        scaler: a loss scaler, which each rank saves too.
        mesh: as in :func:`offbeat.replicate`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        *,
        scaler: torch.amp.GradScaler | None = None,
        mesh: World | None = None,
    ) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self.each: list[Replica] = []
        self._scaler = scaler
        self._loss: Tensor | float = 0.0  # of the micro-batches since the last step
        try:
            for part, optimizer in zip(
                parts_of(model, self.optimizers), self.optimizers, strict=True
            ):
                self.each.append(
                    replicate(part, algorithm, mesh=mesh, optimizer=optimizer, scaler=scaler)
                )
        except BaseException:
            self.detach()
            raise

    def add_loss(self, loss: Tensor | float) -> None:
        """Add the loss of a micro-batch, divided by their number, to that of the coming step."""
        self._loss = self._loss + (loss.detach() if isinstance(loss, Tensor) else loss)

    def step(self, optimizer: Optimizer) -> None:
        """Exchange after a step of ``optimizer``, also if a scaler has skipped it."""
        replica = self.each[next(i for i, o in enumerate(self.optimizers) if o is optimizer)]
        replica.report_loss(self._loss)
        self._loss = 0.0
        replica.step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange no gradients inside the block: they accumulate."""
        for replica in self.each:
            replica.set_requires_sync(False)
        try:
            yield
        finally:
            for replica in self.each:
                replica.set_requires_sync(True)

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Show the average model inside the block; all ranks enter."""
        with ExitStack() as stack:
            for replica in self.each:
                stack.enter_context(replica.consensus())
            yield self.model

    def average_state(self) -> dict[str, Any]:
        """Return a copy of the model's state dict with the average of all ranks; all call."""
        with self.consensus():
            state = self.model.state_dict()
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def measures(self) -> dict[str, float]:
        """Return ``seconds_stalled`` and ``mb_sent`` of the last step, of all replicas."""
        last = [replica.stats()["last"] for replica in self.each]
        return {
            "seconds_stalled": sum(one.get("seconds_stalled", 0.0) for one in last),
            "mb_sent": sum(one.get("bytes_sent", 0.0) for one in last) / 1e6,
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this rank's optimizers, replicas and loss scale to its file in a folder."""
        save_per_rank(folder, **self._parts())

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore what :meth:`save` wrote; all ranks call, after the model is loaded."""
        load_per_rank(folder, **self._parts())

    def finish(self) -> None:
        """Set all ranks to the average."""
        for replica in self.each:
            replica.finish()

    def detach(self) -> None:
        """Remove what was attached to the model."""
        for replica in self.each:
            replica.detach()

    def _parts(self) -> dict[str, Stateful]:
        parts: dict[str, Stateful] = {f"optimizer{i}": o for i, o in enumerate(self.optimizers)}
        parts |= {f"replica{i}": replica for i, replica in enumerate(self.each)}
        return parts | ({"scaler": self._scaler} if self._scaler is not None else {})
