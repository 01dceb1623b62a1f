"""The operations of a replica: a model that trains together with its copies on other ranks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.attach import checks
from offbeat.attach.first_step import check_start, keeps_equal
from offbeat.elastic.agreement import Stage
from offbeat.elastic.generation import Generation
from offbeat.exchange import Saved
from offbeat.recipes.composed import compose
from offbeat.replica.backward.gradient_exchange import GradientExchange
from offbeat.replica.backward.optimizer_steps import bare_optimizer
from offbeat.replica.backward.watch import BackwardWatch
from offbeat.replica.consensus import Consensus
from offbeat.replica.norm import Share
from offbeat.replica.saving import checkpoint
from offbeat.replica.switching.switched import Switched
from offbeat.replica.uneven import Batch, Uneven
from offbeat.replica.weighting import Weighting
from offbeat.telemetry.recorder import Recorder


@final
class Replica(Switched):
    """Trains a model together with its copies on other ranks; :func:`replicate` returns it.

    Parameters are a valid model at any moment outside of offbeat's own calls. All ranks call
    ``step``, ``finish``, ``consensus``, ``show_average``, ``update_bn``, ``consensus_distance`` and
    ``load_state_dict``, in the same order; every other method is local. ``gradients`` and
    ``parameters`` are the two slots. ``is_new``: this rank has joined a run, and has the state of
    the others; it is False after its first step.
    """

    def __init__(self, members: Generation) -> None:
        """Register the hooks; use :func:`replicate`."""
        model = members.filler.model
        self.model, self._exchanged = model.module, model
        self.notes, self.steps = members.notes, members.steps
        self.lost, self.joined, self.is_averaged = members.lost, members.joined, not members.joined
        self._members, self._connection = members, members.connection
        self.gradients, self.parameters = members.gradients, members.parameters
        self._trained, self._before, self._followers = model.trained, checks.Snapshot(model), []
        about: Saved = {"rank": self.world.rank, "nodes": self.world.nodes}
        about |= self._named_algorithm
        self._recorder = Recorder(members.meter, about, self._trained)
        self._consensus, self._is_detached = Consensus(members), False
        is_later = members.planned != repr(self.algorithm)  # than the phase in which it has joined
        planned = compose(members.planned) if is_later else self.algorithm
        self._schedule = [*planned.phases]
        if self.algorithm.auto is not None:
            self._autopilot.require_candidates()
        is_shared = self.algorithm.gradients is not None and self.algorithm.gradients.partition
        self._share = Share(model, self.gradients.site if is_shared else None)
        self._installed: Any = None
        exchange = GradientExchange(members, self._transact)
        self._watch = BackwardWatch(self._trained, exchange, self._require_open)
        self.weighting = Weighting(members)
        self._watch.is_first &= not self.joined  # the others compared theirs in an earlier one

    def step(self) -> None:
        """Exchange parameters after an optimizer step, if the algorithm does so in this step.

        Call it once per optimizer step on every rank, whatever the optimizer did. Raises
        ``ValueError`` on all ranks if parameters of one were replaced, unfrozen, cast or moved
        since ``replicate``; the first step also if ranks began with different parameters under a
        method that keeps them equal, or the model was wrapped. Raises :class:`PeerLost` if a rank
        is lost.
        """
        self._require_open()
        self._require_unchanged()
        self._note(self._watch.make_up())
        self.weighting.begin_step()
        with self._members.at(Stage.HAS_STEPPED):
            self._members.heal()
            self._make_step()
            while self.weighting.is_resting and not self.has_left:
                self._make_step()
        self.weighting.end_step()

    def _make_step(self) -> None:
        self._admit()
        self._end_step()
        self._let_go()
        if self.has_left:
            self.detach()
        else:
            self._go_on()

    def _end_step(self) -> None:
        self._together("step", self._step)
        self.steps, self.is_averaged, self.is_new = self.steps + 1, False, False
        self._members.end_step()
        since, measures = self.parameters.staleness(self.steps), self.parameters.measures
        self._recorder.stepped(since, measures, self.weighting.now)
        self.weighting.go_on(self.steps)

    def set_requires_sync(self, requires_sync: bool) -> None:
        """Set whether the next backward exchanges gradients.

        For gradient accumulation: False for all but the last micro-batch. A later exchange covers
        everything accumulated since the last one. The parameters slot is not affected.
        """
        self._watch.enable(bool(requires_sync))

    def set_weight(self, samples: float) -> None:
        """Say how many samples the coming steps of this rank stand for, before their backward.

        Local; with ``replicate(..., weighted=True)``, and 1 until it is set. Raises ``ValueError``
        on all ranks for anything but 0 to 2^53, and if only some have called before a first step.
        """
        self._require_open()
        self.weighting.set(samples)

    def uneven(self, batches: Iterable[Batch], filler: Batch | None = None) -> Uneven[Batch]:
        """Return an iterable over ``batches`` that ends on all ranks together.

        With ``replicate(..., weighted=True)``. A rank that has no more batches repeats its last
        one, or ``filler``, with zero gradients and the weight 0. See :class:`Uneven`.
        """
        given = batches, filler, self._trained.values(), self.weighting.run_out
        return Uneven(*given, self.gather, lambda: self.weighting.place(self.steps))

    def finish(self) -> None:
        """Merge everything in flight and set every replica to the average, buffers included.

        All ranks call, before the last evaluation or save; training may continue. Float buffers
        are averaged, others come from the first rank. In an elastic run it holds one more model.
        """
        self._require_open()
        self._note(self._watch.unstepped(self.steps))
        with self._consensus.settling():
            self._recorder.finished(self._together("finish", self._finish))
        self.parameters.reset()
        self._members.settle(self.steps)
        self._watch.finished()
        self.is_averaged = True
        self._restart_clock()

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Show the average model inside the block, then restore this rank's own parameters.

        All ranks enter. Training continues as if the block had not been there. A block inside the
        block shows the same average and sends nothing. Extra memory inside the block: one model.
        """
        is_outer = not self._consensus.own
        try:
            yield self.show_average()
        finally:
            if is_outer:
                self.show_own()

    def show_average(self) -> nn.Module:
        """Show the average model until :meth:`show_own`, as inside :meth:`consensus`; all call.

        Returns the model. Does nothing more where the average is shown already.
        """
        self._require_open(also_shown=True)
        self._note(self._watch.unstepped(self.steps))
        if not self._consensus.own:
            self._together("consensus", lambda: self._consensus.show(self.steps))
            self._watch.look()
        return self.model

    def show_own(self) -> None:
        """Restore this rank's own parameters and buffers after :meth:`show_average`, if shown."""
        if self._consensus.own:
            self._consensus.hide()
            self._restart_clock()

    def update_bn(self, loader: Iterable[Any], device: torch.device | None = None) -> None:
        """Compute the BatchNorm statistics of the average model on the batches of all ranks.

        All ranks call, inside :meth:`consensus` or after :meth:`finish`, each with its own batches,
        as ``torch.optim.swa_utils.update_bn(loader, model, device)``: one forward of each. The
        result is that of one process with all batches. Raises ``ValueError`` on all ranks
        elsewhere, or if no rank has a batch. Bytes sent: 2 (n-1)/n of the buffers'.
        """
        self._require_open(also_shown=True)
        is_one_model = self.is_averaged or keeps_equal(self.algorithm)
        self._together("update_bn", self._consensus.measured(loader, device, is_one_model))
        self._restart_clock()

    def owned_parameters(self) -> list[nn.Parameter]:
        """Return what this rank's optimizer steps: all parameters, or its share of them.

        With ``adasum(partition=True)`` ranks of a node share the parameters, but not ignored ones.
        """
        return self._share.owned()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients to a norm of at most ``max_norm``; returns the norm they had.

        As ``torch.nn.utils.clip_grad_norm_``, without ignored parameters; with
        ``adasum(partition=True)`` and of a sharded model of all gradients of the node, whose ranks
        call between backward and the next step.
        """
        self._require_open()
        if self._exchanged.is_sharded:  # scaled after it: a loss repeats the call
            norm = self._transact(lambda: self._share.norm(norm_type, self.parameters.site))
        else:
            with self._connection.calling("clip_grad_norm_" if self._share.site else None):
                norm = self._share.norm(norm_type, None)
        self._share.clip(max_norm, norm)
        return norm

    def consensus_distance(self) -> dict[str, float]:
        """Return :func:`.consensus.consensus_distance` of all replicas; all ranks call."""
        self._require_open()
        distance = self._together("consensus_distance", self._consensus.distance)
        self._restart_clock()
        return distance

    def report_loss(
        self, loss: float | Tensor, kind: Literal["train", "heldout"] = "train"
    ) -> None:
        """Record this rank's loss of the coming step, or of an evaluation; no communication.

        ``daso`` detects plateaus of the training loss, ``offbeat compare`` draws both kinds. An
        evaluation ends with this report: its time and bytes count for no step.
        """
        self._recorder.report(loss, kind)
        if kind == "heldout":
            self._restart_clock()
        else:
            self.parameters.report(loss)

    def install(self, optimizer: Optimizer) -> None:
        """Call :meth:`step` after every ``optimizer.step()``, for loops you do not own.

        For one optimizer, also in the wrapper of a framework, and not with ``GradScaler``, which
        may skip the step of one rank while the others wait for it.
        """
        self._require_open()
        bare = bare_optimizer(optimizer, earlier=self._installed is not None)
        self._installed = bare.register_step_post_hook(lambda *_: self.step())

    def state_dict(self) -> Saved:
        """Return all that a resumed run needs of this rank, under the key ``rank<r>``.

        Starts no communication, but waits for messages in flight. Call it on every rank, between
        a ``step()`` and the next backward that exchanges, and save it by
        :func:`offbeat.save_per_rank`, by ``torch.save`` to one file per rank or by
        ``torch.distributed.checkpoint`` to one folder. Inside ``consensus()`` it is the state of
        training, not of the average. Gradients accumulated so far are not part of it.

        In an elastic run a loss found in that wait is survived as in ``step()``, and states saved
        then may be of different worlds: resume from another one.
        """
        self._require_open(also_shown=True)
        self._watch.require_spent("state_dict")
        state = self.steps, self.is_averaged, self._consensus.own
        return self._transact(lambda: checkpoint.save(self._members, *state))

    def load_state_dict(self, saved: Saved) -> None:
        """Continue where the saved run stopped, bit for bit; all ranks call.

        In an elastic run a loss found here is survived: the others load their own states again
        and start from these models, as survivors of an earlier loss do. Raises ``ValueError``, the
        same on all ranks and before anything is written, if the state of any rank is damaged, does
        not fit this replica, or is of another moment or run.
        """
        self._require_open()
        losses = len(self.lost)
        with self._in_phase_of(saved, stays=True):
            given = self._members, saved, checkpoint.fault_in_node(self._members, saved)
            self.steps, self.is_averaged = self._together(
                "load_state_dict", lambda: checkpoint.load(*given)
            )
        self._members.exchanges_from = 0
        self._members.committed_in = -1  # of another time
        self._members.wait_from(self.steps)
        alone = 0 if self.is_averaged else self.parameters.staleness(self.steps)
        self._members.settle(self.steps - alone)
        self._watch.loaded()
        # After a loss others may be past their first step: they have heard of it there.
        self._watch.is_first &= len(self.lost) == losses

    def check_state_dict(self, saved: Saved) -> None:
        """Raise what :meth:`load_state_dict` would, and load nothing; all ranks call.

        What is registered with its state loads it, and then what it had.
        """
        self._require_open()

        def check() -> None:  # what it finds is of this rank, and others of its node have their own
            checkpoint.check(self._members, saved, fault)

        with self._in_phase_of(saved, stays=False):
            fault = checkpoint.fault_in_node(self._members, saved)
            self._together("check_state_dict", check)

    def stats(self) -> dict[str, Any]:
        """Return bytes sent, messages, seconds stalled and staleness: last step and totals."""
        here = {"step": self.steps, "measures": self.parameters.measures()}
        if self.algorithm.auto is not None and self._autopilot.decisions:
            here["auto"] = self._autopilot.decisions
        return self._members.stats() | here | self._recorder.stats() | self.gradients.stats()

    def detach(self) -> None:
        """Remove every hook, thread and group; the model stays as it is. Idempotent."""
        if self._is_detached:
            return
        self._is_detached = True
        self._watch.remove()
        if self._installed is not None:
            self._installed.remove()
        self._recorder.close()
        self._members.close()

    def _restart_clock(self) -> None:
        """Exclude the time since the last step from the next one, unless that has begun."""
        if not self._watch.begun:
            self._recorder.restart()

    def _require_unchanged(self) -> None:
        self._exchanged.reshard()
        if (change := self._before.change(self._exchanged, self.world.rank)) is not None:
            raise self._members.report_error(change)
        self._watch.require_closed()

    def _step(self) -> None:
        if self._watch.is_first:
            start = self._watch.start, self._watch.is_changed, self.is_averaged
            note = check_start(self._exchanged, self.algorithm, self._connection, *start)
            self.notes += [note] if note else []
            self.weighting.settle()
        self.gradients.stepped()  # before we write parameters: a write is a sign of use
        if self.steps >= self._members.exchanges_from:
            with torch.no_grad():
                self.parameters.step(self.steps)
                if self.algorithm.parameters is not None and self.parameters.site is not None:
                    self.parameters.site.copy_replicated()
        self._recorder.backward(self._watch.first_gradient, self._watch.last_gradient)
        self._watch.stepped()

    def _finish(self) -> dict[str, float]:
        self.gradients.stepped()  # before we write parameters: a write is a sign of use
        distance, note = self._consensus.drift()
        self._note(note)
        self._consensus.set("finish", self.steps)
        return distance
