"""The steps of all optimizers of this process, told to those who watch them."""

import weakref
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_watches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def watch(watch: Any) -> None:
    """Call ``watch.optimizer_starts`` and ``optimizer_stepped`` in each step, while it is held."""
    _watches[id(watch)] = watch


def forget(watch: Any) -> None:
    """Tell ``watch`` of no more steps."""
    _watches.pop(id(watch), None)


def _tell(event: str, optimizer: Optimizer, *_: object) -> None:
    for ref in _watches.valuerefs():
        if (watch := ref()) is not None:
            getattr(watch, event)(optimizer)


# Once and for good. Every step of an optimizer iterates over the hooks of the process: one that
# another thread adds meanwhile, or the garbage collector removes, would end that step by an error.
register_optimizer_step_pre_hook(partial(_tell, "optimizer_starts"))
register_optimizer_step_post_hook(partial(_tell, "optimizer_stepped"))
