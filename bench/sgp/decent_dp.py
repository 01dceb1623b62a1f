"""The GPT of the examples trained with the package decent-dp, one process per node.

The last line that rank 0 prints is the time of a step on the slowest rank.
"""

import argparse
import time

import torch
import torch.distributed as dist
from char_gpt import GPT, loss_of, read_corpus
from decent_dp.ddp import DecentralizedDataParallel
from loguru import logger


def main(args: argparse.Namespace) -> None:
    """Train; a fifth of the steps is warm-up."""
    logger.remove()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DecentralizedDataParallel(
        GPT(args.width, args.depth, 4, args.context),
        lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        topology="one-peer-exp",
    )
    train, _ = read_corpus()
    warm_up = max(3, args.steps // 5)  # its first steps record the order of the parameters
    start = 0.0
    for step in range(args.steps):
        if step == warm_up:
            start = time.perf_counter()
        starts = torch.randint(len(train) - args.context, (args.batch_size,))
        loss_of(model, train, starts, args.context).backward()  # steps inside backward
    seconds = torch.tensor((time.perf_counter() - start) / (args.steps - warm_up))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(seconds.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("steps", "batch-size", "context", "width", "depth"):
        parser.add_argument(f"--{name}", type=int, required=True)
    main(parser.parse_args())
