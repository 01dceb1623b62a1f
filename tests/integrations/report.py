"""What a case has found, for the tests that have started its ranks."""

import json
from typing import Any

import torch.distributed as dist


def report(name: str, found: dict[str, Any]) -> None:
    """Print what all ranks have found as one line of JSON; all ranks call."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps({"case": name, "ranks": everyone}), flush=True)
