"""What the server of forked processes imports, once.

Forking is safe as long as the server has one thread and has computed nothing: a child would
inherit a pool of OpenMP, a process group or a heartbeat without its threads.
"""

import gc
from pathlib import Path

import pytest  # noqa: F401  # the test modules, which ranks import for their functions, need it
import torch.distributed.checkpoint
import torch.distributed.run

import offbeat
import offbeat.testing  # noqa: F401
from offbeat.kernels.dispatch import (
    adasum_passes,
    machine_code,
    push_sum_passes,
    top_k_of_blocks,
)

# What the first optimizer of a process imports, and its first kernels, takes a second.
torch.optim.SGD([torch.zeros(1)])
CPU = torch.device("cpu")
push_sum_passes(CPU), adasum_passes(CPU, compiled=machine_code(CPU) != "")
top_k_of_blocks(CPU)(torch.zeros(2), [(0, 2, 1)])


def require_one_thread() -> None:
    """Refuse to fork where an import has started a thread."""
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    # That of Arrow's allocator, which pandas imports: it starts anew in a child.
    others = [name for name in threads if name != "jemalloc_bg_thd"]
    assert len(others) == 1, f"an import has started a thread: {threads}"


require_one_thread()

# The garbage collector of a child leaves these objects alone, so that their memory stays shared.
gc.freeze()
