"""What LAGS is timed beside: torch's hooks, and parts of its own step."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from bench.harness import Claim, Effect, attached
from bench.harness.attached import Attached, Build, wrapped
from bench.harness.training import Times
from offbeat.functional import max_speedup
from offbeat.methods.top_k.ddp_hook import LagsState, lags_hook

POWER, HOOK = "torch PowerSGD", "lags_hook in DDP"
PAPER = {  # S1, S2 and S_max of Table 2
    "ResNet-50": (2.86, 1.31, 1.52),
    "Inception-v4": (3.08, 1.28, 1.29),
    "LSTM-PTB": (8.52, 1.11, 1.28),
}
# What no selection with error feedback does without: gradients are added to residuals, all of them
# are read once, the dense gradients are cleared for those that arrive, and ranks meet once a step.
FLOOR = "alone, a barrier and three passes a step"
OBSERVED = 10  # steps in which adaptive LAGS chooses its ratios


def attach(method: str, model: nn.Module, build: Build) -> Attached:
    """One of these, or what every bench has."""
    if method == POWER:
        return wrapped(model, build, powerSGD_hook, PowerSGDState(None, 1, start_powerSGD_iter=2))
    if method == HOOK:
        run = wrapped(model, build)
        state = LagsState(run.module, optimizer=run.optimizer)
        run.module.register_comm_hook(state, lags_hook)  # type: ignore[operator]
        return run
    if method == FLOOR:
        return Attached(model, build(model.parameters()), model, three_passes(model))
    run = attached.attach(method, model, build)
    run.lead = OBSERVED if "adaptive" in method else None
    return run


def three_passes(model: nn.Module) -> Callable[[Tensor], None]:
    """Add each gradient to a residual as soon as it is there; return the rest, a step's end."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    residual, dense = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
    for parameter, part in zip(model.parameters(), residual.split(sizes), strict=True):

        def add(parameter: Tensor, part: Tensor = part) -> None:
            assert parameter.grad is not None
            part.view_as(parameter).add_(parameter.grad)

        parameter.register_post_accumulate_grad_hook(add)

    def end(_: Tensor) -> None:
        residual.aminmax()
        dense.zero_()
        dist.barrier()

    return end


def judged(text: str, paper: float, ours: Times, other: Times, source: str) -> Claim:
    """That a step is as many times as fast as another one, as in Table 2."""
    return Claim.effect(text, Effect(paper, "x"), Effect(other.over(ours), "x"), source)


def most(alone: Times, slgs: Times) -> float:
    """S_max of eq. 19, the largest speedup of overlap over slgs."""
    exchange = max(0.0, slgs.over(alone) - 1)  # in units of the time of a step alone
    return max_speedup(1 - alone.share, alone.share, exchange) if exchange else 1.0
