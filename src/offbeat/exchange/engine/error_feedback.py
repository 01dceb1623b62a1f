"""Exchanges with residuals, which go back when a gradient is discarded: settings and engine."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.exchange import BoundGradients, GradientExchange, Saved
from offbeat.exchange.engine.engine import Engine
from offbeat.exchange.engine.gradient_use import HandedGradients
from offbeat.exchange.engine.message import FeedbackMessage
from offbeat.exchange.engine.units import Units
from offbeat.functional import accumulation_dtype, all_finite
from offbeat.transport.small_gathers import gather_numbers


class FeedbackExchange(GradientExchange):
    """An exchange whose ranks each save residuals and velocities, by parameter."""

    takes_weights: ClassVar[bool] = True

    @property
    def takes_shards(self) -> bool:
        """Whether it exchanges between nodes: FSDP2 has averaged inside them, all entries."""
        return self.over == "world"

    def inherit(self, saved: Mapping[int, Saved], before: int, rank: int, size: int) -> Saved:
        r"""Keep the mean of residuals and velocities in a world of another size.

        .. math:: \frac{1}{P'} \sum_{r'} \epsilon_{r'} = \frac{1}{P} \sum_r \epsilon_r

        Means of neighbouring ranks' residuals where the world shrinks by a whole factor, copies
        where it grows by one, the mean of all for each rank otherwise.
        """
        heirs = _heirs(before, rank, size)
        if lost := [r for r in heirs if r not in saved]:
            raise ValueError(
                f"the residuals of ranks {lost} are missing; every rank saves its own, and rank "
                f"{rank} of {size} needs those of ranks {heirs} of {before} (of nodes, if the "
                "model is sharded): pass them together, {**one, **another}"
            )
        merged = dict(saved[heirs[0]])
        for kind in {"residual", "velocity"} & merged.keys() if len(heirs) > 1 else ():
            merged[kind] = {
                name: torch.stack([saved[r][kind][name] for r in heirs]).mean(0)
                for name in merged[kind]
            }
        return merged


@dataclass(eq=False)
class ErrorFeedback(Engine[FeedbackMessage]):
    """Adds gradients to residuals when they are ready, and keeps what was not sent of them."""

    units: Units = field(kw_only=True)
    handed: HandedGradients = field(init=False)
    waited: float = 0.0  # seconds, at the end of the last backward

    def __post_init__(self) -> None:
        """Watch the gradients of the site."""
        super().__post_init__()
        self.handed = HandedGradients(self.site.registered, self.site.optimizers)

    def load(self, saved: Saved) -> None:
        """Restore what :meth:`save` returned, residuals in new messages."""
        self.messages, self.home = [], {}
        super().load(saved)
        self._remember(saved)

    def unsent(self) -> list[Tensor]:
        """Return the residuals."""
        return [*self.kept("residual").values()]

    def add_unsent(self, shares: Sequence[Tensor]) -> None:
        """Add to the residuals."""
        saved = self.save()
        for residual, share in zip(saved["residual"].values(), shares, strict=True):
            residual.add_(share)
        self.load(saved)

    def carry(self, earlier: BoundGradients) -> None:
        """Begin with the residuals of ``earlier``, and with its velocities if this has some."""
        if isinstance(earlier, ErrorFeedback):
            kinds = {kind for message in self.messages for kind in message.feedback}
            self._remember({kind: earlier.kept(kind) for kind in {"residual", *kinds}})

    def left(self) -> list[tuple[Tensor, Tensor]]:
        """Return the residuals in units of gradients, by the scales of the last backward."""
        parameters, scales = self.site.parameters, self.units.scales
        kept = self.kept("residual").items() if scales else ()
        return [(parameters[name], rest * scales[name].to_grad) for name, rest in kept]

    @property
    def has_residuals(self) -> bool:
        """Whether this rank has not sent all of its gradients."""
        return any(residual.any() for residual in self.kept("residual").values())

    def build(self) -> None:
        """Build the messages, which go on with the residuals of those before them."""
        kinds = {kind for message in self.messages for kind in message.feedback}
        kept = {kind: self.kept(kind) for kind in kinds}
        super().build()
        self._remember(kept)

    def kept(self, kind: str) -> dict[str, Tensor]:
        """Copy residuals or velocities, by parameter; zeros for those of which nothing is kept."""
        found = {}
        # A gradient still in .grad that was not used before step() counts as discarded.
        unused = self.handed.pending if self.handed.has_stepped else ()
        dense = {n: p for n, p in self.site.parameters.items() if n not in self.site.sparse}
        for name, parameter in dense.items():
            dtype = accumulation_dtype(parameter.dtype)
            found[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if feedback := self.home[name].feedback.get(kind):
                found[name].copy_((feedback.used if name in unused else feedback.latest)[name])
        return found

    def begin(self) -> None:
        """Read learning rates, the loss scale and the weight of this backward."""
        super().begin()
        self.units.read(self.site.factor)

    def add(self, name: str) -> None:
        """Add the gradient to its residual, once it is known what became of the last one."""
        message, continues = self.home[name], False
        if name in self.handed.pending:
            is_used, is_intact = self.handed.pop(name, accumulated=name in self.seen)
            if is_used:
                message.resolve((name,), (), is_last=False)
            elif not is_intact:
                message.resolve((), (name,), is_last=False)
            continues = is_intact and not self.handed.has_stepped
        message.add(name, continues=continues)
        message.missing.discard(name)

    def collect(self) -> None:
        """Wait for all messages; write and keep the results of all or, not finite, of none."""
        is_finite = self._wait()
        self.site.commit()
        for message in self.messages:
            if is_finite:
                message.commit()
            else:
                message.undo()
        self.copy_replicated()
        if self.seen:
            self.handed.record()
        else:  # a backward that this rank did not run: the others use what it sent
            self._settle(set(), set())

    def missed(self) -> None:
        """Keep what was not sent; no gradient of this exchange is left here that could be used."""
        for message in self.messages:
            for feedback in message.feedback.values():
                if all_finite([feedback.next.whole]):
                    feedback.commit()
        self._settle(set(), set())

    def stepped(self) -> None:
        """Keep what used gradients left, and go back to before those that were discarded."""
        self._settle(*self.handed.step())
        super().stepped()

    def accumulated(self, name: str) -> None:
        """Note that this gradient was accumulated, but not exchanged."""
        self.handed.accumulated(name)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note that the gradients of the optimizer's parameters were used."""
        self.handed.optimizer_stepped(optimizer)

    def _remember(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        for kind in ("residual", "velocity"):
            for name, tensor in kept.get(kind, {}).items():
                self.home[name].remember(kind, name, tensor)
        self.handed.pending.clear()

    def _wait(self) -> bool:
        """Wait for all messages; return whether all are finite, also those of a node's shards."""
        # All or none: a message may not keep its new residuals while another is undone, nor may
        # the shards of one rank while those of another are, which other groups exchange.
        started = time.perf_counter()
        is_finite = all([message.wait() for message in self.messages])  # noqa: C419  # wait for all
        self.waited = time.perf_counter() - started
        return all(here for (here,) in gather_numbers([is_finite], self.site.shards))

    def _settle(self, used: set[str], discarded: set[str]) -> None:
        pending = {self.home[name] for name in self.handed.pending}
        for message in self.messages:
            is_last = message not in pending
            names = set() if is_last else used.intersection(message.names)
            message.resolve(names, discarded.intersection(message.names), is_last=is_last)


def _heirs(before: int, rank: int, size: int) -> list[int]:
    """Return the ranks of the old world whose mean residual ``rank`` of the new one takes."""
    if before % size == 0:
        share = before // size
        return list(range(rank * share, (rank + 1) * share))
    return [rank % before] if size % before == 0 else list(range(before))
