"""Process groups of our own, apart from the registry of ``torch.distributed``.

``dist.new_group`` would do for groups that live as long as the process. But its groups must be
made by all ranks of the world together, or else are named by a hash of their members, and a name
that comes back after ``detach()`` meets the first group's addresses in the store and hangs.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store

TIMEOUT = timedelta(minutes=30)  # torch's own; heartbeats end the waits of training long before


def backends_of(group: ProcessGroup) -> dict[torch.device, str]:
    """Which backend carries the tensors of which kind of device."""
    return {d: str(group._get_backend(d).name()).lower() for d in group._device_types}


def open_group(
    store: Store,
    rank: int,
    size: int,
    backends: Mapping[torch.device, str],
    host: str | None = None,
    timeout: timedelta = TIMEOUT,
) -> ProcessGroup:
    """A group of ``size`` members that meet in ``store``; all of them must call.

    Gloo listens on ``host``, or by default on the interface that GLOO_SOCKET_IFNAME names. The
    backends are wrapped as ``torch.distributed`` does: alone they lack the tensor collectives.
    """
    group = ProcessGroup(store, rank, size)
    opened: dict[str, Any] = {}
    for device, name in backends.items():
        if name not in opened:
            meet = dist.PrefixStore(name, store)
            opened[name] = _open(name, meet, rank, size, host, timeout)
        kind = getattr(ProcessGroup.BackendType, name.upper())
        group._register_backend(device, kind, opened[name])
        group._set_default_backend(kind)
    return group


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long members wait for one that does not come, as ``init_process_group`` was told."""
    backend = group._get_backend(group._device_types[0])
    found = getattr(getattr(backend, "options", None), "_timeout", TIMEOUT)
    return found if isinstance(found, timedelta) else TIMEOUT


def _open(
    name: str, store: Store, rank: int, size: int, host: str | None, timeout: timedelta
) -> Any:
    if name == "gloo":
        if host is None:
            return ProcessGroupGloo(store, rank, size, timeout=timeout)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)
    if name == "nccl":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, nccl)
    raise ValueError(
        f"the process group runs on the backend {name!r}, expected gloo or nccl; call "
        "torch.distributed.init_process_group('gloo') or ('cpu:gloo,cuda:nccl')"
    )
