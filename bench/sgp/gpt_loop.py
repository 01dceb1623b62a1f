"""A rank that trains the GPT of the benches under SGP or with the package decent-dp.

Rank 0 prints one line of JSON: seconds of a step on the slowest rank, and seconds of a core that
a rank needs for it.
"""

import json
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from bench.harness.attached import Attached, adamw, attach
from bench.harness.gpt import gpt


def decent_dp(model: nn.Module) -> Attached:
    """A model whose optimizer steps inside backward; none is left for the loop."""
    from decent_dp.ddp import DecentralizedDataParallel  # not installed everywhere
    from loguru import logger

    def build(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return adamw(parameter for _, parameter in named)

    logger.remove()
    module = DecentralizedDataParallel(model, build, topology="one-peer-exp")
    return Attached(model, adamw([torch.zeros(1)]), module)


def used() -> tuple[float, float]:
    """Seconds that have passed, and of a core that this process has used, in the kernel too."""
    core = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), core.ru_utime + core.ru_stime


def main(method: str, steps: int) -> None:
    """Train; a fifth of the steps is warm-up."""
    dist.init_process_group("gloo")
    task = gpt()
    is_theirs = method == "decent-dp"
    run = decent_dp(task.model) if is_theirs else attach(method, task.model, adamw)
    warm_up = max(3, steps // 5)  # decent-dp records the order of the parameters in its first steps
    for _ in range(warm_up):
        run.step(task.loss)
    dist.barrier()
    before = used()
    for _ in range(steps - warm_up):
        run.step(task.loss)
    spent = torch.tensor([before, used()], dtype=torch.float64).diff(dim=0) / (steps - warm_up)
    everyone = [torch.zeros_like(spent) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, spent)
    if dist.get_rank() == 0:
        step, core = torch.cat(everyone).T
        print(json.dumps({"step": step.max().item(), "core": core.mean().item()}), flush=True)
    dist.barrier()
    # decent-dp leaves messages on the way, for which its threads would wait.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
