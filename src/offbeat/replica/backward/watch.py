"""Hooks that run when a gradient is accumulated and when backward ends."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from inspect import currentframe

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.attach.checks import Watcher
from offbeat.attach.first_step import digest
from offbeat.exchange import BoundGradients
from offbeat.liveness.heartbeats.crossed_waits import others_of
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.platform.privates import backward_number, call_after_backward
from offbeat.platform.process_group import collectives_launched, default_group, world_ranks
from offbeat.replica.backward import optimizer_steps
from offbeat.replica.backward.gradient_exchange import GradientExchange
from offbeat.replica.backward.shared_steps import have_equal_gradients, shared_step_fault


class BackwardWatch(Watcher):
    """Calls the gradients slot during backward, and records whether a backward has begun.

    One hook on every trainable parameter, one callback at the end of each backward. Checked on
    torch 2.13: plain models and non-reentrant checkpointing run the callback once, at the very
    end; reentrant checkpointing also runs it at the end of every nested backward, before the
    hooks of other blocks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        exchange: GradientExchange,
        require_open: Callable[[], None],
    ) -> None:
        """Register the hooks; ``require_open`` raises where no backward is allowed."""
        self.parameters, self.exchange, self.require_open = parameters, exchange, require_open
        self.enabled = True
        self.is_first = self.heartbeat is not None  # the first step after an attach or a load
        self.start: int | None = None  # digest of the parameters at its first gradient
        self._settled = digest(parameters.values())  # and at the attach, the load or finish()
        self.begun = False  # a gradient was accumulated since the last step
        self._is_last = False  # and in a backward that exchanges, the last one before a step
        self._is_seen = False  # a gradient was accumulated since `enabled` has changed
        self.exchanged = False  # and the slot has combined gradients since then
        self.first_gradient = self.last_gradient = 0.0  # when, for the timeline of a step
        self.is_open = False  # an exchange waits for the end of this backward
        self._is_queued = False
        self._is_used = False  # an optimizer has stepped since the attach
        self._stepped_unseen = False  # an optimizer has used gradients of no backward
        self._unsent_names: set[str] = set()  # accumulated since the last exchange, without one
        self._stepped_unsent = False  # an optimizer has used such gradients
        # Collectives so far and the last gradient, where each optimizer of the first step began:
        # one may step another, or as its base class.
        self._before: list[tuple[int, float]] = []
        self._communicated: str | None = None  # a warning of such a step
        self._task = self._outer_task = -1  # which backward is running, as autograd counts them
        self._handles: list[RemovableHandle] = []
        self.hook()
        optimizer_steps.watch(self)

    def hook(self) -> None:
        """Register the hooks, in place of those of the slot before; an empty slot costs less."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for name, parameter in self.parameters.items():
            if not (is_trained := parameter.requires_grad):
                parameter.requires_grad_(True)  # torch takes no hook for a frozen one
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(
                    self._note if self.slot.is_empty else partial(self._accumulated, name)
                )
            )
            if not is_trained:
                parameter.requires_grad_(False)

    @property
    def slot(self) -> BoundGradients:
        """The gradients slot at present."""
        return self.exchange.slot

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The heartbeat at present."""
        return self.exchange.heartbeat

    def _note(self, _: Tensor) -> None:
        # As short as possible: between two matrix products none of this is in a cache.
        self.last_gradient = time.perf_counter()
        if not self._is_seen:
            self._see()

    def _see(self) -> None:
        """Handle the first gradient of a step, or after :meth:`enable` or :meth:`look`."""
        self.require_open()
        self._is_seen = True
        self._is_last |= self.enabled
        if not self.begun:
            self.begun, self.first_gradient = True, self.last_gradient
            if self.is_first and self.start is None:
                self.start = digest(self.parameters.values())

    def enable(self, enabled: bool) -> None:
        """Set whether the next backward exchanges gradients."""
        self._is_seen &= enabled == self.enabled
        self.enabled = enabled

    def look(self) -> None:
        """Ask at the next gradient whether a backward is allowed, also inside a step."""
        self._is_seen = False

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        self._note(parameter)
        task = backward_number()
        if task != self._task:
            self._enter(task)
        if parameter.grad is None:
            raise self._report_error(_used_inside(name))
        if not self.enabled:
            self.slot.accumulated(name)
            self._unsent_names.add(name)
            return
        self.is_open = True
        if not self._is_queued:
            self._is_queued = True
            call_after_backward(self._over)
        self.exchange.ready(name)

    def _enter(self, task: int) -> None:
        """Handle the first gradient of a backward, or after the start or end of a nested one."""
        self.require_open()
        self._task = task
        if _inside_another_backward():
            return
        if self.is_open and self._outer_task not in (-1, task):
            raise self._report_error(
                "the last backward ended before its exchange did (it raised?), and other ranks may "
                "have gone on; start again from the last checkpoint"
            )
        self._outer_task = task

    def _report_error(self, text: str) -> Exception:
        assert self.heartbeat is not None, "an exchange has somebody to exchange with"
        return self.heartbeat.report_error(ValueError(text))

    def _over(self) -> None:
        self._is_queued = False
        if not self.is_open:
            return
        if not self.slot.complete() and _inside_another_backward():
            # Reentrant checkpointing: outer blocks' hooks are still to come, and queue us again.
            return
        self.join()

    def join(self) -> None:
        """Finish the exchange of this backward, with zeros for gradients this rank lacks."""
        self.is_open, self._outer_task = False, -1
        self.exchanged = True
        self._unsent_names.clear()
        buffers = self.exchange.buffers
        if buffers is not None and (fault := buffers.fault()) is not None:
            raise self._report_error(fault)
        self.exchange.finish()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Notice optimizers that communicate, or use gradients which have not been exchanged."""
        if self._before:
            self._note_collectives(optimizer, *self._before.pop())
        if self.is_first and not self._is_used:
            self._is_used = bool(self._held_by(optimizer))
        if self.slot.is_empty:
            return
        is_inside = backward_number() != -1
        if is_inside or not self.begun or self._unsent_names:
            held = self._held_by(optimizer)
            if is_inside and held:
                raise self._report_error(_used_inside(held[0]))
            used = {name for name in held if self.parameters[name].grad is not None}
            self._stepped_unseen |= bool(used) and not self.begun
            self._stepped_unsent |= not used.isdisjoint(self._unsent_names)
        self.slot.optimizer_stepped(optimizer)

    def optimizer_starts(self, optimizer: Optimizer) -> None:
        """Note the parameters before the first change: an optimizer may step inside backward."""
        if not self.is_first:
            self._before.clear()  # of a first step that has raised
            return
        self._before.append((collectives_launched(), self.last_gradient))
        if not self._held_by(optimizer):
            return
        if (fault := shared_step_fault(optimizer, self.slot)) is not None:
            raise self._report_error(fault)
        if self.start is None:
            self.start = digest(self.parameters.values())

    def _note_collectives(self, optimizer: Optimizer, launched: int, gradient: float) -> None:
        """Note a step that has communicated, if that mixes ranks with different gradients."""
        # A step that ran a backward has a closure, in which others may have communicated.
        if launched == collectives_launched() or gradient != self.last_gradient:
            return
        alike = have_equal_gradients(world_ranks(default_group()), self.slot)
        if not alike and self._held_by(optimizer):
            self._communicated = _COMMUNICATED.format(type(optimizer).__name__)

    def _held_by(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the parameters that an optimizer steps."""
        ours = {id(parameter): name for name, parameter in self.parameters.items()}
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        return [ours[key] for key in held if key in ours]

    def make_up(self) -> str | None:
        """Contribute zeros to the exchange of a backward that this rank did not run.

        Returns a warning if there was such an exchange, or if a gradient was used without one.
        """
        if self.slot.is_empty or not self.enabled or self.exchanged:
            return _UNSENT if self._stepped_unsent else self._communicated
        # .grad stays as it is: the result is too late for this step and wrong for the next. What is
        # there, of an earlier step, may be views of the buffers that are exchanged.
        had = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.parameters.items()
        }
        if not self.begun:
            for parameter in self.parameters.values():
                parameter.grad = None
        self.join()
        for name, parameter in self.parameters.items():
            parameter.grad = had[name]
        return _UNSEEN if self._stepped_unseen else _NO_BACKWARD

    def unstepped(self, steps: int) -> str | None:
        """Return a warning if an optimizer has stepped, but no ``step()`` followed in the run."""
        return _UNSTEPPED if self._is_used and not steps else None

    def require_spent(self, verb: str) -> None:
        """Raise if gradients wait for a step, other than those of an accumulation that goes on."""
        # Beside other replicas they may wait for nothing: in a GAN, the backward of the generator
        # reaches the critic too, which discards these gradients.
        if self._is_last and (self.heartbeat is None or not others_of(self.heartbeat)):
            raise ValueError(
                f"{verb}() was called after a backward that no step() followed; call it right "
                "after replica.step(), when gradients are spent"
            )

    def require_closed(self) -> None:
        """Raise if the exchange of a backward is still open."""
        if self.is_open and self._is_queued:
            raise self._report_error(
                "the last backward raised before its exchange was complete, and other ranks may "
                "have gone on; start again from the last checkpoint"
            )
        if self.is_open:
            raise self._report_error(
                "the last backward did not finish its exchange: reentrant checkpointing together "
                "with parameters that a rank did not use; checkpoint with use_reentrant=False"
            )

    def stepped(self) -> None:
        """Start a new step: the next backward is its first."""
        self.forget()
        self.is_first = self._stepped_unseen = self._stepped_unsent = False
        self.start = None

    def forget(self) -> None:
        """Count what has been accumulated as spent."""
        self.begun = self._is_last = self.exchanged = self._is_seen = False

    @property
    def is_changed(self) -> bool:
        """Whether others than an optimizer have written parameters before the first step."""
        return self.start is not None and self.start != self._settled

    def finished(self) -> None:
        """Start from the average of the replicas."""
        self.forget()
        if self.is_first:
            self.start, self._settled = None, digest(self.parameters.values())

    def loaded(self) -> None:
        """Start from a saved state, whose next step is a first one."""
        self.is_first = self.heartbeat is not None
        self.finished()

    def remove(self) -> None:
        """Remove the hooks."""
        optimizer_steps.forget(self)
        for handle in self._handles:
            handle.remove()


_NO_BACKWARD = "a step() without a backward: this rank gave zeros and missed the others' update"
_UNSEEN = (
    "a step() without a backward, although an optimizer stepped: its gradients (of "
    "torch.autograd.grad or torch.func, or set by hand) were not exchanged; compute them by "
    "backward(), or average them yourself"
)
_UNSTEPPED = (
    "an optimizer stepped, and replica.step() was never called: call it after every "
    "optimizer.step(), where methods count steps and exchange parameters"
)
_UNSENT = (
    "an optimizer stepped with gradients that were not exchanged: no backward with "
    "set_requires_sync(True) came after that with False, and ranks now differ; call "
    "set_requires_sync(True) before the last backward of every step, also of a shorter last one"
)
_COMMUNICATED = (
    "{} communicates in its step(), with ranks whose gradients or models differ under this "
    "algorithm; use offbeat.ddp(), or an optimizer that steps by this rank's gradients alone"
)


def _used_inside(name: str) -> str:
    return (
        f"parameter {name!r}: its gradient was used, or cleared, inside of backward, before it was "
        "exchanged: by an optimizer that steps in hooks? Step after backward() has returned"
    )


def _inside_another_backward() -> bool:
    """Return whether a Python autograd function called the backward that is ending."""
    frame = currentframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
