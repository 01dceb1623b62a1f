"""The optimizer to which :meth:`Replica.install` adds a hook."""

from typing import Any

from torch.optim import Optimizer


def bare_optimizer(optimizer: Any, *, earlier: bool) -> Optimizer:
    """Return the optimizer inside the wrappers of frameworks; ``earlier``: one is installed.

    Raises ``ValueError`` for anything but one optimizer, and for a wrapper with a ``GradScaler``,
    which skips steps of the optimizer inside.
    """
    found = optimizer
    # A wrapper is a subclass in name only: it has no hooks of its own.
    while not hasattr(found, _HOOKS) and isinstance(getattr(found, "optimizer", None), Optimizer):
        if getattr(found, "scaler", None) is not None:
            raise ValueError(
                f"install() got {type(found).__name__} with a GradScaler, which may skip the step "
                "of one rank while the others wait for it; call replica.step() yourself after "
                "optimizer.step()"
            )
        found = found.optimizer
    if not isinstance(found, Optimizer) or not hasattr(found, _HOOKS) or earlier:
        raise ValueError(
            f"install() got {type(optimizer).__name__}, after {int(earlier)} earlier call; it "
            "takes one torch.optim.Optimizer, once; with several optimizers call step() yourself"
        )
    return found


_HOOKS = "_optimizer_step_post_hooks"
