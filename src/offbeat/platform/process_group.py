"""All that offbeat uses of ``torch.distributed`` beyond its documented interface, in one file.

:mod:`offbeat.platform.privates` lists the names, and the versions of torch that have them.

Process groups are opened here, apart from the registry of ``torch.distributed``.
``dist.new_group`` would do for groups that live as long as the process. But its groups must be
made by all ranks of the world together, or else are named by a hash of their members, and a name
that is used again after ``detach()`` finds the first group's addresses in the store and hangs.
"""

import contextlib
import ctypes
import itertools
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store, Work
from torch.nn.parallel import DistributedDataParallel

from offbeat.platform import nccl, privates  # noqa: F401  # a clear error where one is missing
from offbeat.platform.addresses import with_addresses
from offbeat.platform.answering import ports_of_sockets

TIMEOUT = timedelta(minutes=30)  # torch's own; heartbeats end the waits of training long before
NEVER_SENT = 2**30  # a tag that no message has
HELLO = NEVER_SENT - 1  # the tag of a rank's answer to a search
_CLONING = threading.Lock()
GLOO = {torch.device("cpu"): "gloo"}  # backends of groups beside those of torch


def is_running() -> bool:
    """Return whether ``torch.distributed`` has a default process group."""
    return dist.is_available() and dist.is_initialized()


def available_backends() -> list[str]:
    """Return the names of the backends with which torch was built."""
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in names if getattr(dist, f"is_{name}_available", bool)()]


def default_group() -> ProcessGroup:
    """Return the default process group; raise ``ValueError`` if there is none."""
    if not is_running():
        raise ValueError(
            "no process group: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group() first and start with torchrun, or set "
            "OFFBEAT_STORE to the host:port of `offbeat store`"
        )
    return dist.distributed_c10d._get_default_group()


def release_in_defaults(group: ProcessGroup) -> None:
    """Let ``group`` end in ``destroy_process_group()`` though torch's functions hold it."""
    from torch.distributed.nn import functional  # the first optimizer imports it, not offbeat

    # The defaults of their arguments are the default group of the time of their import. The
    # threads of a group that lives on abort the process if they end a message while Python ends.
    # None means the same group.
    for each in vars(functional).values():
        if isinstance(each, FunctionType) and each.__defaults__:
            given = each.__defaults__
            each.__defaults__ = tuple(None if value is group else value for value in given)


def collectives_launched() -> int:
    """Return how many collectives this rank has launched on the default process group."""
    if is_running():
        group: Any = default_group()
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            return int(group._get_sequence_number_for_group())  # not in the stubs
    return 0


def default_store() -> Store:
    """Return the rendezvous store of the default process group."""
    return default_group().get_group_store()


def world_ranks(group: ProcessGroup) -> tuple[int, ...]:
    """Return the members' ranks in the world; 0, 1, ... for a group that torch does not know."""
    if is_running() and group in dist.distributed_c10d._world.pg_map:
        return tuple(dist.get_process_group_ranks(group))
    return tuple(range(group.size()))


def backends_of(group: ProcessGroup) -> dict[torch.device, str]:
    """Return the name of the backend for each type of device."""
    return {d: str(group._get_backend(d).name()).lower() for d in group._device_types}


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout that ``init_process_group`` was given."""
    backend = group._get_backend(group._device_types[0])
    found = getattr(getattr(backend, "options", None), "_timeout", TIMEOUT)
    return found if isinstance(found, timedelta) else TIMEOUT


def open_group(
    store: Store,
    rank: int,
    size: int,
    *,
    backends: Mapping[torch.device, str],
    host: str | None = None,
    timeout: timedelta = TIMEOUT,
    is_lazy: bool = False,
    connections: int = 1,
) -> ProcessGroup:
    """Open a group of ``size`` members that rendezvous in ``store``; all of them must call.

    Gloo listens on ``host``, or by default on the interface that GLOO_SOCKET_IFNAME names.
    ``is_lazy``: members connect when they first speak to each other, which :func:`connect_to`
    does. ``connections``: how many Gloo has between two members (:func:`connections_of`).
    """
    # Wrapped as torch.distributed does: alone the backends lack the tensor collectives.
    group = ProcessGroup(store, rank, size)
    opened: dict[str, Any] = {}
    for device, name in backends.items():
        if name not in opened:
            meet = dist.PrefixStore(name, store)
            devices = _gloo_devices(host, is_lazy, connections) if name == "gloo" else []
            opened[name] = _open_backend(name, meet, rank, size, devices, timeout, is_lazy)
        kind = getattr(ProcessGroup.BackendType, name.upper())
        group._register_backend(device, kind, opened[name])
        group._set_default_backend(kind)
    return group


def open_loopback(store: Store, rank: int, size: int, **how: Any) -> ProcessGroup:
    """Open a Gloo group over the loopback interface, for ranks that are threads."""
    return open_group(store, rank, size, backends=GLOO, host="127.0.0.1", **how)


def connections_of(group: ProcessGroup) -> int:
    """Return how many connections two members have, 1 without Gloo."""
    # Gloo sends messages with the tag t over number t mod n, and launches collectives in turn.
    if not has_connections(group):
        return 1
    options: Any = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return max(1, len(getattr(options, "_devices", ())))


def another_client(store: Store) -> tuple[Store, frozenset[int]]:
    """Return a client of the same store that waits for no calls of this one, and its sockets."""
    with _CLONING:  # a socket that opens meanwhile would be taken for the clone's
        others = client_sockets(store)
        clone: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        return clone, client_sockets(store) - others


def client_sockets(store: Store) -> frozenset[int]:
    """Return the descriptors of this process's sockets that lead to the host of a TCPStore."""
    # A client offers none of its own: only its text shows it, after two look-ups of host names.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return frozenset()
    return frozenset(d for d, ports in ports_of_sockets().items() if ports[1:] == [store.port])


def hang_up(sockets: Iterable[int]) -> None:
    """Make all calls that wait on these sockets raise; their clients are of no use afterwards."""
    for descriptor in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
            same.shutdown(socket.SHUT_RDWR)


def thread_store() -> Store:
    """Return a store in memory, for ranks that are threads of this process."""
    return dist.HashStore()


def open_subgroup(groups: Sequence[Sequence[int]]) -> ProcessGroup:
    """Open process groups in the registry of torch; return this rank's. All ranks must call."""
    own: ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
    return own


def attach_torch_ddp(
    model: nn.Module, parameters: Iterable[Tensor], bucket_mb: float
) -> Callable[[], None]:
    """Let DistributedDataParallel average gradients, over the default group; return the undoing."""
    # As torch's composable replicate(), which cannot be undone, nor leave out single parameters.
    ddp = DistributedDataParallel(nn.ParameterList(parameters), bucket_cap_mb=bucket_mb)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        DistributedDataParallel._active_ddp_module = ddp
        return ddp._pre_forward(*args, **kwargs)

    def leave(*_: Any) -> None:
        DistributedDataParallel._active_ddp_module = None

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
        model.register_forward_hook(lambda _, args, output: ddp._post_forward(output)),
    ]

    def remove() -> None:
        leave()  # an interrupt of forward skips the hooks
        for hook in hooks:
            hook.remove()
        ddp._remove_autograd_hooks()
        ddp.module = nn.ParameterList()  # it lives on until the collector runs

    return remove


def all_gather_flat(group: ProcessGroup, out: Tensor, tensor: Tensor) -> Work:
    """Launch an all-gather of ``tensor`` (m) into ``out`` (n * m)."""
    # The tensor form of torch.distributed is deprecated in 2.13 and its successor is missing in
    # 2.11; the process group's own method is the same in both.
    return group._allgather_base(out, tensor)


def all_to_all_flat(group: ProcessGroup, out: Tensor, tensor: Tensor) -> Work:
    """Launch the sending of part i of ``tensor`` (n * m) to member i; ``out`` is what arrives."""
    return group.alltoall_base(out, tensor, [], [])


def coalesced(group: ProcessGroup, device: torch.device, launch: Callable[[], object]) -> Work:
    """Make the calls of ``launch`` one launch: NCCL pairs sends and receives within one only."""
    group._start_coalescing(device)
    launch()
    return group._end_coalescing(device)


def end_waits(
    group: ProcessGroup, connected: Collection[int] | None = None, *, is_over: bool = False
) -> None:
    """Make every pending wait on ``group`` raise; ``connected``: the peers in a lazy group.

    ``is_over``: all members have received all messages, and call.
    """
    # abort() does not wake a blocked Gloo receive. But a receive that times out makes Gloo fail all
    # pairs of the group, and with them all its waits: so we let one time out on purpose. From each
    # peer in turn: where the peer has closed its side, ours fails at once and wakes no wait. One
    # that is not connected would block us.
    peers = set(range(group.size())) - {group.rank()} if connected is None else connected
    for device, backend in backends_of(group).items():
        if backend != "gloo":
            end = nccl.shut_down if is_over else nccl.abort
            end(group._get_backend(device))
        elif device.type == "cpu":
            tags = [NEVER_SENT + i for i in range(connections_of(group))]
            for peer, tag in itertools.product(peers, tags):
                with contextlib.suppress(RuntimeError):
                    work = group.recv([torch.empty(1, device="cpu")], peer, tag)
                    work.wait(timedelta(milliseconds=1))


def has_kernels(group: ProcessGroup) -> bool:
    """Return whether messages are kernels on a stream, which a wait only puts in order: NCCL."""
    return {*backends_of(group).values()} != {"gloo"}


def leave_to_parent(groups: Iterable[ProcessGroup]) -> None:
    """Keep ``groups`` and those of torch for as long as this process lives: a forked child."""
    # It shares their sockets with its parent, but has none of their threads. The end of a group
    # there waits for them for ever, and removes the sockets from what the parent's thread polls.
    kept: list[object] = list(groups)
    if is_running():
        kept += [*dist.distributed_c10d._world.pg_map, default_store()]
    for item in kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def has_connections(group: ProcessGroup) -> bool:
    """Return whether the members are connected by sockets that close when a process ends."""
    return backends_of(group).get(torch.device("cpu")) == "gloo"


def receive_hello(group: ProcessGroup, peer: int) -> None:
    """Block until ``peer`` says hello; raise ``RuntimeError`` if its process has ended."""
    group.recv([torch.empty(1, device="cpu")], peer, HELLO).wait()


def send_hello(group: ProcessGroup, peer: int) -> None:
    """Complete what ``peer`` waits for in :func:`receive_hello`."""
    group.send([torch.zeros(1, device="cpu")], peer, HELLO).wait()


def connect_to(group: ProcessGroup, peers: Collection[int]) -> None:
    """Connect to ``peers`` in a group that is lazy; each of them must do so too."""
    # The first message between two members blocks where it is launched, on one of the two, until
    # the other has one for it. Which one is decided by the order of their addresses. So no cycle of
    # such waits is possible, and here, before anything else depends on a message, all of them end.
    if has_connections(group):
        hellos = [(p, HELLO - i) for p in peers for i in range(connections_of(group))]
        works = [group.send([torch.zeros(1, device="cpu")], *hello) for hello in hellos]
        works += [group.recv([torch.empty(1, device="cpu")], *hello) for hello in hellos]
        for work in works:
            work.wait()


def _gloo_devices(host: str | None, is_lazy: bool, connections: int) -> list[Any]:
    """Return the devices of a group of Gloo, each with a connection; a lazy one is of one group."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if host is not None:
        each: list[dict[str, str]] = [{"hostname": host}]
    else:
        each = [{"interface": name} for name in names]
    if each:
        wanted = each * connections
        return [ProcessGroupGloo.create_device(**how, lazy_init=is_lazy) for how in wanted]
    create = ProcessGroupGloo.create_default_device
    return [create(lazy_init=is_lazy) for _ in range(connections)]


def _open_backend(
    name: str,
    store: Store,
    rank: int,
    size: int,
    devices: list[Any],
    timeout: timedelta,
    is_lazy: bool,
) -> Any:
    if name == "gloo":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        options._devices = devices
        options._timeout = timeout
        options._threads = 2 * len(devices)  # as torch: else collectives wait for those before

        def over(store: Store) -> ProcessGroupGloo:
            return ProcessGroupGloo(store, rank, size, options)

        return with_addresses(store, size, over) if is_lazy else over(store)
    if name == "nccl":
        return nccl.open_nccl(store, rank, size, timeout)
    raise ValueError(
        f"the process group runs on the backend {name!r}, expected gloo or nccl; call "
        "torch.distributed.init_process_group('gloo') or ('cpu:gloo,cuda:nccl')"
    )
