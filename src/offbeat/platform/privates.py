"""The private names of torch that offbeat uses, and the versions of torch in which each was found.

Importing this file raises ``ImportError`` where one is missing. Those of ``torch.distributed`` are
called in :mod:`offbeat.platform.process_group` only; attributes of modules and tensors, and
``_foreach`` operations, also elsewhere.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d
import torch.nn.modules.batchnorm
from torch import Tensor

OLDEST, NEWEST = (2, 10), (2, 15)  # tried: 2.10 and 2.12 to 2.15

# Each was found in all versions from OLDEST to NEWEST that were tried.
_DISTRIBUTED = """
    distributed_c10d._get_default_group distributed_c10d._world
    ProcessGroup._allgather_base ProcessGroup._device_types ProcessGroup._end_coalescing
    ProcessGroup._get_backend ProcessGroup._get_sequence_number_for_group
    ProcessGroup._register_backend ProcessGroup._set_default_backend ProcessGroup._start_coalescing
    ProcessGroup.get_group_store ProcessGroupGloo._Options ProcessGroupGloo.create_device
    Store.clone
"""
_OTHERS = """
    _C._current_graph_task_id _C._storage_Use_Count _foreach_copy_ _foreach_norm _foreach_zero_
    autograd.Variable._execution_engine nn.modules.batchnorm._BatchNorm
    nn.modules.batchnorm._NormBase nn.parallel.DistributedDataParallel._active_ddp_module
    nn.parallel.DistributedDataParallel._post_forward
    nn.parallel.DistributedDataParallel._pre_forward
    nn.parallel.DistributedDataParallel._remove_autograd_hooks
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
"""
NAMES = [f"distributed.{name}" for name in _DISTRIBUTED.split()] + _OTHERS.split()
# Of instances, and of a module that only scripts import: they are not looked for. In
# ProcessGroupGloo._Options, modules, tensors, operators, placements.
ATTRIBUTES = {
    "_devices", "_threads", "_timeout", "_buffers", "_cdata", "_indices", "_modules",
    "_non_persistent_buffers_set", "_parameters", "_schema", "_spec", "_StridedShard",
}  # fmt: skip


def check_version(version: str = torch.__version__, names: list[str] = NAMES) -> None:
    """Raise ``ImportError`` for a torch that is too old, or has changed what offbeat uses of it.

    >>> check_version("2.9.1+cpu")
    Traceback (most recent call last):
    ImportError: offbeat needs torch 2.10 or newer, got 2.9.1+cpu; run: pip install 'torch>=2.10'
    >>> check_version("2.99.0", ["distributed.ProcessGroup._gone"])
    Traceback (most recent call last):
    ImportError: torch 2.99.0 has no torch.distributed.ProcessGroup._gone, which offbeat uses; \
offbeat was tested with torch 2.10 to 2.15; run: pip install 'torch>=2.10,<2.16'
    """
    (old, oldest), (new, newest) = OLDEST, NEWEST
    if is_older(version):
        raise ImportError(
            f"offbeat needs torch {old}.{oldest} or newer, got {version}; "
            f"run: pip install 'torch>={old}.{oldest}'"
        )
    if missing := [name for name in names if not _exists(name)]:
        raise ImportError(
            f"torch {version} has no torch.{missing[0]}, which offbeat uses; offbeat was tested "
            f"with torch {old}.{oldest} to {new}.{newest}; "
            f"run: pip install 'torch>={old}.{oldest},<{new}.{newest + 1}'"
        )


def is_older(version: str) -> bool:
    """Return whether a version of torch is older than those that offbeat supports."""
    return _minor(version) < OLDEST


def is_tested(version: str) -> bool:
    """Return whether offbeat was tested with a version of torch, or with both beside it.

    >>> is_tested("2.13.0+cpu"), is_tested("2.99.0")
    (True, False)
    """
    return OLDEST <= _minor(version) <= NEWEST


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _exists(name: str) -> bool:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None and part != "_active_ddp_module":  # that is None between forwards
            return False
    return True


check_version()

NormBase = torch.nn.modules.batchnorm._NormBase
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
ignore_in_ddp: Callable[..., None] = (
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
)


def backward_number() -> int:
    """Return a number for the backward that runs in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` once, at the end of the backward that runs in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def users_of_memory(tensor: Tensor) -> int:
    """Return how many tensors share the memory of ``tensor``, itself and the call included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def allow_parts_in_files() -> None:
    """Let ``torch.load`` read what torch 2.10 saves of a parameter on two axes, but refuses."""
    if module := sys.modules.get("torch.distributed.tensor.placement_types"):
        torch.serialization.add_safe_globals([module._StridedShard])
