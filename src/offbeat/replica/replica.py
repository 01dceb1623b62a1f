"""A model that trains together with its copies on other ranks."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.comm.group import Group
from offbeat.comm.heartbeat import PeerLost
from offbeat.comm.links import Links
from offbeat.comm.meter import Meter
from offbeat.comm.world import World
from offbeat.exchange import Algorithm, Saved, Site
from offbeat.functional import pack
from offbeat.replica import checkpoint, checks, recovery
from offbeat.replica.backward import BackwardWatch
from offbeat.replica.consensus import (
    agree_on_steps,
    average_buffers,
    average_parameters,
    consensus_distance,
)
from offbeat.replica.norm import total_norm
from offbeat.telemetry.recorder import Recorder

Result = TypeVar("Result")


class Replica:
    """This rank's copy of the model, as :func:`replicate` returns it.

    Parameters are a valid model at any moment outside our own calls. ``step``, ``finish``,
    ``consensus``, ``consensus_distance`` and ``load_state_dict`` are for all ranks to call, in
    the same order; the others are this rank's own.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        world: World,
        links: Links | None,
        control: Group | None,
        optimizers: tuple[Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Fill the slots; use :func:`replicate`."""
        self.model, self.algorithm, self.world = model, algorithm, world
        self.steps = 0
        self.settled = True  # no step since all replicas were equal
        self.notes: list[str] = []
        self.lost: list[dict[str, int]] = []
        self._exchanges_from = 0  # the step at which survivors of a loss have caught up
        self._links, self._control = links, control
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._traits = checks.traits(model)
        self.gradients_state = self._fill("gradients", optimizers, scaler)
        self.parameters_state = self._fill("parameters", optimizers, scaler)
        self._site = self._average_site()
        exchange, state = self.slot("gradients")
        self._shared: Site | None = state.site if exchange and exchange.partition else None
        about = {"algorithm": repr(algorithm), "rank": world.rank, "nodes": world.nodes}
        self._telemetry = Recorder(links.meter if links else Meter(), about)
        self._closed: str | None = None
        self._installed: Any = None
        self._watch = BackwardWatch(
            self._parameters,
            *self.slot("gradients"),
            self._refuse,
            links.heartbeat if links else None,
        )

    def step(self) -> None:
        """The optimizer has stepped: exchange parameters if the algorithm says so.

        Once per optimizer step on every rank, whatever the optimizer did. Raises ``ValueError``
        if parameters were replaced, frozen, unfrozen, cast or moved since ``replicate``.
        """
        self._refuse()
        self._together("step", self._step)
        exchange, state = self.slot("parameters")
        self.steps, self.settled = self.steps + 1, False
        staleness = 0 if exchange is None else exchange.staleness(state, self.steps)
        self._telemetry.stepped(staleness, self._measures)

    def set_requires_sync(self, requires_sync: bool) -> None:
        """Whether the next backward exchanges gradients: False for all but the last micro-batch.

        A later exchange covers everything accumulated since the last one. The parameters slot
        does not care.
        """
        self._watch.enabled = bool(requires_sync)

    def finish(self) -> None:
        """Merge what is in flight and set every replica to the average, buffers too.

        Before the last evaluation or save; training may go on. All ranks call. Float buffers are
        averaged, others come from the first rank.
        """
        self._refuse()
        self._telemetry.finished(self._together("finish", self._finish))
        self._watch.begun = self._watch.exchanged = False
        self.settled = True
        self._restart_clock()

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Show the average model inside the block, then give this rank's own parameters back.

        All ranks enter; training goes on as if nothing had happened. Extra memory inside the
        block: one model.
        """
        self._refuse()
        shown = [*self._parameters.values(), *self.model.buffers()]
        own = [tensor.detach().clone() for tensor in shown]
        self._together("consensus", lambda: self._average("consensus", shown, own))
        self._closed = _SHOWN
        try:
            yield self.model
        finally:
            if self._closed == _SHOWN:
                self._closed = None
            with torch.no_grad():
                pack(shown, own)
            self._restart_clock()

    def owned_parameters(self) -> list[nn.Parameter]:
        """What this rank's optimizer steps: all, or its share with ``adasum(partition=True)``."""
        owners = self._shared.owners() if self._shared else {}
        mine = self.world.local_rank
        return [p for name, p in self._parameters.items() if owners.get(name, mine) == mine]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm``; returns the norm they had.

        As ``torch.nn.utils.clip_grad_norm_``. With ``adasum(partition=True)`` the norm is that of
        all gradients of the node, and all its ranks call, between backward and the next step.
        """
        self._refuse()
        site, parameters = self._shared, self._parameters.values()
        with self._calling("clip_grad_norm_") if site else nullcontext():
            norm = total_norm(parameters, norm_type, site.group if site else None)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def consensus_distance(self) -> dict[str, float]:
        """How far the replicas are apart; see :func:`offbeat.replica.consensus.consensus_distance`."""
        self._refuse()
        distance = self._together(
            "consensus_distance", lambda: consensus_distance(self._parameters, self._control)
        )
        self._restart_clock()
        return distance

    def report_loss(
        self, loss: float | Tensor, kind: Literal["train", "heldout"] = "train"
    ) -> None:
        """Tell this rank's loss of the step, or of an evaluation; no communication.

        ``daso`` sees plateaus in the training loss, ``offbeat compare`` draws its curves from both.
        The time and the bytes of an evaluation, which ends with this report, belong to no step.
        """
        self._telemetry.report(loss, kind)
        exchange, state = self.slot("parameters")
        if kind == "heldout":
            self._restart_clock()
        elif exchange is not None:
            exchange.report(state, loss)

    def install(self, optimizer: Optimizer) -> None:
        """Call :meth:`step` after every ``optimizer.step()``, for loops you do not own.

        One optimizer. Not for ``GradScaler``: it skips steps, on one rank perhaps, and the others
        would wait; call ``step()`` yourself there.
        """
        self._refuse()
        if not isinstance(optimizer, Optimizer) or self._installed is not None:
            raise ValueError(
                f"install() got {type(optimizer).__name__}, after "
                f"{0 if self._installed is None else 1} earlier call; it takes one "
                "torch.optim.Optimizer, once; with several optimizers call step() yourself"
            )
        self._installed = optimizer.register_step_post_hook(lambda *_: self.step())

    def state_dict(self) -> Saved:
        """All that a resumed run needs of this rank, under the key ``rank<r>``.

        Starts no communication. Call it between a ``step()`` and the next backward, on every
        rank, and save with ``torch.save`` to one file a rank or with
        ``torch.distributed.checkpoint`` to one folder.
        """
        self._refuse()
        if self._watch.begun:
            raise ValueError(
                "state_dict() was called after a backward that no step() followed; save right "
                "after replica.step(), when gradients are spent"
            )
        return checkpoint.save(self)

    def load_state_dict(self, saved: Saved) -> None:
        """Go on where the saved run stopped, bit for bit; all ranks call, after ``replicate``."""
        self._refuse()
        with self._calling("load_state_dict"):
            checkpoint.load(self, saved, self._control)
            agree_on_steps(self.steps, "load_state_dict", self._control)
        self._exchanges_from = 0
        self._watch.begun = self._watch.exchanged = False

    def stats(self) -> dict[str, Any]:
        """Bytes sent, messages, seconds stalled and staleness: of the last step and in total."""
        exchange, state = self.slot("gradients")
        return {
            "algorithm": repr(self.algorithm),
            "rank": self.world.rank,
            "size": self.world.size,
            "step": self.steps,
            "notes": list(self.notes),
            "measures": self._measures(),
            "lost": [dict(loss) for loss in self.lost],
            **self._telemetry.stats(),
            **(exchange.stats(state) if exchange is not None else {}),
        }

    def detach(self) -> None:
        """Remove every hook, thread and group; the model stays as it is. Twice does nothing."""
        if self._closed == _DETACHED:
            return
        self._closed = _DETACHED
        self._watch.remove()
        if self._installed is not None:
            self._installed.remove()
        self._telemetry.close()
        if self._links is not None:
            self._links.close()

    def slot(self, name: str) -> tuple[Any, Any]:
        """The exchange in the slot "gradients" or "parameters" and its state, if it is in use."""
        state = getattr(self, f"{name}_state")
        return (getattr(self.algorithm, name), state) if state is not None else (None, None)

    def _measures(self) -> dict[str, float]:
        exchange, state = self.slot("parameters")
        measures: dict[str, float] = exchange.measures(state) if exchange is not None else {}
        return measures

    def _fill(self, slot: str, optimizers: tuple[Optimizer, ...], scaler: Any) -> Any:
        exchange = getattr(self.algorithm, slot)
        if exchange is None:
            return None
        if self._links is not None:
            given = optimizers, scaler, self._control
            site = Site.on(exchange.over, self._links, self.model, *given)
            if site.size > 1 or (exchange.partition and site.inside is not None):
                return exchange.init(site)
        self.notes.append(f"the {slot} slot has nobody to exchange with: {exchange} does nothing")
        return None

    def _restart_clock(self) -> None:
        """What went on since the last step was no part of the next, unless that has begun."""
        if not self._watch.begun:
            self._telemetry.restart()

    def _average_site(self) -> Site | None:
        """Between whom ``finish`` averages: the participants of the parameters slot, or all."""
        if self.parameters_state is not None:
            site: Site = self.parameters_state.site
            return site
        return Site.on("world", self._links, self.model) if self._links else None

    def _step(self) -> None:
        change = checks.change_since(self._traits, self.model, self.world.rank)
        if change is not None:
            raise self._links.heartbeat.condemn(change) if self._links else change
        self._watch.require_closed()
        self._join_backward()
        exchange, state = self.slot("parameters")
        if exchange is not None and self.steps >= self._exchanges_from:
            with torch.no_grad():
                exchange.step(state, self.steps)
        self._telemetry.backward(self._watch.first_gradient, self._watch.last_gradient)
        self._watch.stepped()

    def _finish(self) -> dict[str, float]:
        distance = consensus_distance(self._parameters, self._control)
        self._average("finish")
        exchange, state = self.slot("parameters")
        if exchange is not None:
            exchange.settle(state)
        return distance

    def _average(self, verb: str, shown: Sequence[Tensor] = (), own: Sequence[Tensor] = ()) -> None:
        agree_on_steps(self.steps, verb, self._control)
        if self._site is None:
            return
        with torch.no_grad():
            pack(shown, own)  # a loss may have come in the middle of a first try
            average_parameters(*self.slot("parameters"), self._site)
            average_buffers(list(self.model.buffers()), self._control)

    @contextmanager
    def _calling(self, verb: str) -> Iterator[None]:
        """Tell the other ranks which collective call this rank is in."""
        if self._links is None:
            yield
            return
        with self._links.heartbeat.verb(verb):
            yield
        self._links.heartbeat.next_call()

    def _together(self, verb: str, call: Callable[[], Result]) -> Result:
        """Make a collective call; after a loss that ends nothing, once more among survivors."""
        while True:
            try:
                with self._calling(verb):
                    return call()
            except PeerLost as loss:
                self._go_on(loss)

    def _go_on(self, loss: PeerLost) -> None:
        """Connect to the other survivors, and start from the models as they are."""
        exchange, state = self.slot("parameters")
        if exchange is None or exchange.on_failure == "raise" or self._links is None:
            raise loss
        agreed = recovery.agree_on_survivors(self._links, self.steps, loss)
        self._links, site = recovery.regroup(self._links, agreed), state.site
        self.world, self._exchanges_from = self.world.among(agreed.living), agreed.step
        self.lost += [{"rank": rank, "step": agreed.step} for rank in agreed.lost]
        self._control = self._links.open("world") if self._links else None
        self.parameters_state = self._fill("parameters", site.optimizers, site.scaler)
        self._site = self._average_site()
        self._watch.heartbeat = self._links.heartbeat if self._links else None
        warnings.warn(agreed.text(self.world.rank), RuntimeWarning, stacklevel=4)

    def _join_backward(self) -> None:
        """Take part in the exchange of a backward that this rank did not run."""
        note = "a step() without a backward: this rank gave zeros and missed the others' update"
        if self._watch.make_up() and note not in self.notes:
            self.notes.append(note)
            warnings.warn(f"rank {self.world.rank}: {note}", RuntimeWarning, stacklevel=5)

    def _refuse(self) -> None:
        if self._closed is not None:
            raise ValueError(f"this replica cannot be used {self._closed}")


_SHOWN = "inside consensus(): leave the block first"
_DETACHED = "after detach(): call replicate() again"
