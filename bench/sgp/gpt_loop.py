"""A rank that trains the GPT of the examples under SGP or with the package decent-dp.

Rank 0 prints one line of JSON: seconds of a step on the slowest rank, and seconds of a core that
a rank needs for it.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from char_gpt import GPT, loss_of, read_corpus
from torch import nn

import offbeat

CONTEXT, BATCH = 128, 3


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)


def decent_dp(model: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
    """A model whose optimizer steps inside backward."""
    from decent_dp.ddp import DecentralizedDataParallel  # not installed everywhere
    from loguru import logger

    logger.remove()
    return DecentralizedDataParallel(model, adam, topology="one-peer-exp"), lambda: None


def recipe(model: nn.Module, text: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model under a recipe of offbeat, and what follows backward."""
    optimizer = adam([*model.named_parameters()])
    replica = offbeat.replicate(model, offbeat.algorithm(text), optimizer=optimizer)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        replica.step()

    return model, update


def core_seconds() -> float:
    """Seconds of a core that this process has used, in the kernel too."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(method: str, steps: int) -> None:
    """Train; a fifth of the steps is warm-up."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    plain = GPT(256, 4, 4, CONTEXT)
    model, update = decent_dp(plain) if method == "decent-dp" else recipe(plain, method)
    train, _ = read_corpus()
    warm_up = max(3, steps // 5)  # decent-dp records the order of the parameters in its first steps
    started = used = 0.0
    for step in range(steps):
        if step == warm_up:
            dist.barrier()
            started, used = time.perf_counter(), core_seconds()
        starts = torch.randint(len(train) - CONTEXT, (BATCH,))
        loss_of(model, train, starts, CONTEXT).backward()
        update()
    spent = time.perf_counter() - started, core_seconds() - used
    everyone = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor(spent, dtype=torch.float64) / (steps - warm_up))
    if dist.get_rank() == 0:
        ranks = torch.stack(everyone)
        step, core = ranks[:, 0].max().item(), ranks[:, 1].mean().item()
        print(json.dumps({"step": step, "core": core}), flush=True)
    dist.barrier()
    # decent-dp leaves messages on the way, for which its threads would wait.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
