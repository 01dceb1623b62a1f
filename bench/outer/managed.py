"""The package torchft: every node is a replica group of one rank, with a manager of its own."""

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from bench.harness.attached import Attached, Build
from bench.outer.rounds import EVERY

CLONE_NEWUTS = 0x04000000  # os.unshare exists only from Python 3.12 on


def attach(method: str, model: nn.Module, build: Build) -> Attached:
    """A method by its name in outer/torchft."""
    hush()
    module, optimizer = model, build(model.parameters())
    with ExitStack() as stack:
        manager = manage(stack, is_async="DiLoCo" not in method)
        if "DDP" in method:
            module = DistributedDataParallel(manager, model)
            optimizer = OptimizerWrapper(manager, optimizer)
        elif "LocalSGD" in method:
            stack.enter_context(LocalSGD(manager, model, optimizer, EVERY))
        else:
            parts, delay, mixing = (2, 3, 0.5) if "2 fragments, delay 3" in method else (1, 0, 0.0)
            layers = [*model.layers, model.token, model.position, model.head] if delay else [model]
            fragments = [nn.ModuleList(layers[part::parts]) for part in range(parts)]
            outer = [
                torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True)
                for f in fragments
            ]
            stack.enter_context(DiLoCo(
                manager, fragments, optimizer, outer, EVERY, fragment_sync_delay=delay,
                use_bucketization="one message" in method, fragment_update_alpha=mixing,
            ))  # fmt: skip
        close = stack.pop_all().close
    # Nothing is in flight after a multiple of eight steps.
    return Attached(
        model, optimizer, module, sent=bytes_sent, shown=partial(average, model), close=close,
        lead=EVERY,
    )  # fmt: skip


def manage(stack: ExitStack, is_async: bool) -> Manager:
    """The manager of this rank, whose peers are those of the other ranks."""
    name = name_host()
    store = dist.TCPStore(name, 0, is_master=True, wait_for_workers=False)
    found = [""]
    if dist.get_rank() == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size())
        stack.callback(lighthouse.shutdown)
        found = [lighthouse.address()]
    dist.broadcast_object_list(found)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=60)), None, None, dist.get_world_size(),
        use_async_quorum=is_async, rank=0, world_size=1, store_addr=name, store_port=store.port,
        lighthouse_addr=found[0], replica_id=name, hostname=name, init_sync=False,
    )  # fmt: skip

    def end(_: dist.TCPStore) -> None:
        dist.barrier()  # the store of a group outlives the managers of all
        manager.shutdown(wait=False)

    stack.callback(end, store)
    return manager


def hush() -> None:
    """Discard what native code writes to standard error: torchft logs several lines a step."""
    kept = os.fdopen(os.dup(2), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    sys.stderr = kept  # errors of Python are still shown


def name_host() -> str:
    """Give the node its name in the lab, under which managers reach each other."""
    name = f"node{dist.get_rank()}"
    if socket.gethostname() != name:
        if ctypes.CDLL(None).unshare(CLONE_NEWUTS) != 0:
            raise RuntimeError("torchft needs a host name for every node, which needs root")
        socket.sethostname(name)
    return name


@contextmanager
def average(model: nn.Module) -> Iterator[None]:
    """Show the mean of all ranks' parameters."""
    own = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        dist.all_reduce(p.detach())
        p.detach().div_(dist.get_world_size())
    yield
    for p, kept in zip(model.parameters(), own, strict=True):
        p.detach().copy_(kept)


def bytes_sent() -> float:
    """What has left this node of the lab, headers included."""
    lines = Path("/proc/self/net/dev").read_text("ascii").splitlines()
    return next(float(line.split(":")[1].split()[8]) for line in lines if "eth0:" in line)
