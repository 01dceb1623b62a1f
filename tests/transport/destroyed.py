"""One rank: a replica, an optimizer, and the end of the default group; prints Gloo's threads."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import offbeat


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = offbeat.replicate(model, offbeat.ddp(), optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    replica.step()
    replica.detach()
    dist.barrier()
    dist.destroy_process_group()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    left = [name for name in names if name.startswith("pt_gloo")]
    print(f"left: {left}\n", end="")  # in one write, also where output is not buffered


if __name__ == "__main__":
    main()
