"""What the server of forked processes imports, once.

Forking is safe as long as the server has one thread and has computed nothing: a child would
inherit a pool of OpenMP, a process group or a heartbeat without its threads.
"""

import gc
import os

import pytest  # noqa: F401  # the test modules, which ranks import for their functions, need it
import torch.distributed.checkpoint
import torch.distributed.run  # noqa: F401

import offbeat
import offbeat.testing  # noqa: F401

assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"

# The garbage collector of a child leaves these objects alone, so that their memory stays shared.
gc.freeze()
