"""The process of one rank: calls a bench's function and returns the result of rank 0."""

import importlib
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(module: str, name: str, path: str) -> None:
    """Call the function with the pickled case; the result of rank 0 replaces the case."""
    file = Path(path)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = getattr(importlib.import_module(module), name)
    found = work(pickle.loads(file.read_bytes()))
    dist.barrier()
    if dist.get_rank() == 0:
        file.write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
