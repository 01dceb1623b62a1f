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


def bare_optimizer(optimizer: Any, *, earlier: bool) -> Optimizer:
    """Return the optimizer inside the wrappers of frameworks; ``earlier``: one is installed."""
    found, hooks = optimizer, "_optimizer_step_post_hooks"
    # A wrapper is a subclass in name only: it has no hooks of its own.
    while not hasattr(found, hooks) and isinstance(getattr(found, "optimizer", None), Optimizer):
        if getattr(found, "scaler", None) is not None:
            raise ValueError(
                f"install() got {type(found).__name__} with a GradScaler, which may skip the step "
                "of one rank while the others wait for it; call replica.step() yourself after "
                "optimizer.step()"
            )
        found = found.optimizer
    if not isinstance(found, Optimizer) or not hasattr(found, hooks) or earlier:
        raise ValueError(
            f"install() got {type(optimizer).__name__}, after {int(earlier)} earlier call; it "
            "takes one torch.optim.Optimizer, once; with several optimizers call step() yourself"
        )
    return found
