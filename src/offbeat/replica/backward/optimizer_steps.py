"""The steps of all optimizers of this process, told to those who watch them."""

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class StepWatch(Protocol):
    """What is told of steps, of optimizers of any parameters, that may have been made later."""

    def optimizer_starts(self, optimizer: Optimizer) -> None:
        """Handle an optimizer that is about to step."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Handle an optimizer that has stepped."""


def watch(watch: StepWatch) -> None:
    """Tell ``watch`` of all steps, until it is forgotten or nobody holds it any longer."""
    _watches[id(watch)] = watch


def forget(watch: StepWatch) -> None:
    """Tell ``watch`` of no more steps."""
    _watches.pop(id(watch), None)


_watches: weakref.WeakValueDictionary[int, StepWatch] = weakref.WeakValueDictionary()


def _tell_start(optimizer: Optimizer, *_: tuple[Any, ...] | dict[str, Any]) -> None:
    for ref in _watches.valuerefs():
        if (watch := ref()) is not None:
            watch.optimizer_starts(optimizer)


def _tell_step(optimizer: Optimizer, *_: tuple[Any, ...] | dict[str, Any]) -> None:
    for ref in _watches.valuerefs():
        if (watch := ref()) is not None:
            watch.optimizer_stepped(optimizer)


# Once and for good. Every step of an optimizer iterates over the hooks of the process: one that
# another thread adds meanwhile, or the garbage collector removes, would end that step by an error.
register_optimizer_step_pre_hook(_tell_start)
register_optimizer_step_post_hook(_tell_step)
