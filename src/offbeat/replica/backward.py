"""Hooks that tell when gradients are accumulated and when backward is over."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import currentframe
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from offbeat.comm.heartbeat import Heartbeat
from offbeat.exchange import GradientExchange


class BackwardWatch:
    """Feeds a gradients slot during backward, and knows whether a backward has begun.

    One hook on every trainable parameter, one callback at the end of each backward. Checked on
    torch 2.13: plain and non-reentrant checkpointed models run the callback once, at the very
    end; reentrant checkpointing runs it at the end of every nested backward too, before other
    blocks' hooks.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        exchange: GradientExchange[Any] | None,
        state: Any,
        refuse: Callable[[], None],
        heartbeat: Heartbeat | None,
    ) -> None:
        """Register the hooks; ``refuse`` raises when no backward is allowed."""
        self.parameters, self.exchange, self.state = parameters, exchange, state
        self.refuse, self.heartbeat = refuse, heartbeat
        self.enabled = True
        self.begun = False  # a gradient was accumulated since the last step
        self.exchanged = False  # and the slot has combined gradients since then
        self.first_gradient = self.last_gradient = 0.0  # when, for the timeline of a step
        self.is_open = False  # an exchange waits for the end of this backward
        self._is_queued = False
        self._task = self._outer_task = -1  # which backward is running, as autograd counts them
        self._handles = [
            parameter.register_post_accumulate_grad_hook(
                self._noted if exchange is None else partial(self._accumulated, name)
            )
            for name, parameter in parameters.items()
        ]

    def _noted(self, _: Tensor) -> None:
        # As little as can be: between two matrix products nothing of this is in a cache.
        self.refuse()
        self.last_gradient = time.perf_counter()
        if not self.begun:
            self.begun, self.first_gradient = True, self.last_gradient

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        self._noted(parameter)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._enter(task)
        if self.exchange is None or not self.enabled:
            return
        self.is_open = True
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._over)
        self.exchange.ready(self.state, name)

    def _enter(self, task: int) -> None:
        """The first gradient of a backward, or of one nested in it, or after one nested in it."""
        self._task = task
        if _inside_another_backward():
            return
        if self.is_open and self._outer_task not in (-1, task):
            raise self._condemn(
                "the last backward ended before its exchange did (it raised?), and other ranks may "
                "have gone on; start again from the last checkpoint"
            )
        self._outer_task = task

    def _condemn(self, text: str) -> Exception:
        assert self.heartbeat is not None, "an exchange has somebody to exchange with"
        return self.heartbeat.condemn(ValueError(text))

    def _over(self) -> None:
        self._is_queued = False
        assert self.exchange is not None, "only a slot queues callbacks"
        if not self.is_open:
            return
        if not self.exchange.complete(self.state) and _inside_another_backward():
            # Reentrant checkpointing: outer blocks' hooks are still to come, and queue us again.
            return
        self.join()

    def join(self) -> None:
        """Finish the exchange of this backward, with zeros for what this rank does not have."""
        assert self.exchange is not None, "only a slot is joined"
        self.is_open, self._outer_task = False, -1
        self.exchanged = True
        with self.heartbeat.verb("step") if self.heartbeat else nullcontext():
            self.exchange.finish(self.state)

    def make_up(self) -> bool:
        """Join, with zeros, the exchange of a backward that this rank did not run, if there is one.

        ``.grad`` stays: what arrives is too late for this step and wrong for the next.
        """
        if self.exchange is None or not self.enabled or self.exchanged:
            return False
        # Gradients that lie there still are of an earlier step; copies, since they may be views
        # of what is exchanged.
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        had = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        if not self.begun:
            for parameter in self.parameters.values():
                parameter.grad = None
        self.join()
        for name, parameter in self.parameters.items():
            parameter.grad = had[name]
        return True

    def require_closed(self) -> None:
        """Raise if a backward has ended without us noticing."""
        if self.is_open:
            raise self._condemn(
                "the last backward did not finish its exchange: reentrant checkpointing together "
                "with parameters that a rank did not use; checkpoint with use_reentrant=False"
            )

    def stepped(self) -> None:
        """The step is over: the next backward is a new one."""
        if self.exchange is not None:
            self.exchange.stepped(self.state)
        self.begun = self.exchanged = False

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def is_watched(parameter: Tensor) -> bool:
    """Whether a replica has its hook on this parameter."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    owners = [getattr(getattr(h, "func", h), "__self__", None) for h in hooks.values()]
    return any(isinstance(owner, BackwardWatch) for owner in owners)


def _inside_another_backward() -> bool:
    """Whether a Python autograd function called the backward that is just ending."""
    frame = currentframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
