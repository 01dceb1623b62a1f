"""A script that ends while a call of torch is in flight, which returns while Python finalizes.

Python ends a daemon thread that returns from a call then, through frames of C++ that abort.
"""

import contextlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from offbeat.liveness.failure import PeerLost
from offbeat.liveness.heartbeats import heartbeat
from offbeat.liveness.store.client import StoreSilent, TimedStore
from offbeat.platform.process_group import open_loopback
from offbeat.transport.collectives import all_reduce
from offbeat.transport.links import Links
from offbeat.transport.world import Opener, World


class Finalizing:
    """Lets other processes go on, and ends them, when the modules of Python are removed."""

    def __init__(self, *others: int) -> None:
        self.others = others

    def __del__(self, kill=os.kill, wait=time.sleep, signals=(signal.SIGCONT, signal.SIGKILL)):
        for sent in signals:
            for other in self.others:
                kill(other, sent)
            wait(0.3)


def _local(rank: int, store: dist.Store, opener: Opener = open_loopback) -> Links:
    return Links.connect(World(rank, ((0, 1),), store, opener))


def store_call(rank: int, store: dist.Store, host: int, returns: bool = False) -> None:
    """The host of the store is stopped."""
    if rank == 0:
        timed = TimedStore(store, returns=returns)
        timed.limit(0.5)
        os.kill(host, signal.SIGSTOP)
        with contextlib.suppress(StoreSilent):
            timed.check(["key"])


def returning_call(rank: int, store: dist.Store, host: int) -> None:
    """The same, of a store that may be started again."""
    store_call(rank, store, host, returns=True)


def opening(rank: int, store: dist.Store, host: int) -> None:
    """A rank is lost before the others have connected to it."""

    def lost(*_: object, **__: object) -> ProcessGroup:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it has ended")

    with contextlib.suppress(PeerLost):
        _local(rank, store, lost if rank else open_loopback).open("local", peers=())


def exchange(rank: int, store: dist.Store, host: int) -> None:
    """A rank of this node is stopped."""
    group = _local(rank, store).open("local")
    assert group is not None
    all_reduce(torch.ones(10), group).wait()
    if rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(0.5)
        sys.kept = all_reduce(torch.ones(10), group)  # type: ignore[attr-defined]


if __name__ == "__main__":  # pytest imports all files, in search of doctests
    heartbeat.BEAT, heartbeat.PROMPT, heartbeat.SILENT_AFTER = 0.2, 0.5, 2.0
    read, write = os.pipe()
    if (host := os.fork()) == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, f"{served.port}\n".encode())
        time.sleep(20)
        os._exit(0)
    port = int(os.read(read, 20))
    other = os.fork()
    rank = int(other == 0)
    globals()[sys.argv[1]](rank, dist.TCPStore("127.0.0.1", port, is_master=False), host)
    if rank:
        time.sleep(20)
        os._exit(0)
    sys.modules["finalizing"] = Finalizing(host, other)  # type: ignore[assignment]
