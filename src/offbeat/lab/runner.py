"""Runs of a command on every rank of a cluster, and those over the loopback interface."""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, final

from offbeat.lab import launch, leftovers
from offbeat.lab.cluster import Cluster
from offbeat.lab.faults import Cut, Fault, Kill, RunControl, injected, require_no_overlap
from offbeat.lab.launch import Entry
from offbeat.lab.network.delaying import Usage
from offbeat.lab.network.links import Links
from offbeat.lab.output import OnLine, Output

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def discard_line(rank: int | None, line: str) -> None:
    """Ignore a line of output."""


class Runner(ABC):
    """Runs a command on every rank of a cluster; a context manager, for one or several runs.

    :class:`~offbeat.lab.Lab` emulates a network between nodes, :class:`~offbeat.lab.Loopback` uses
    the loopback interface.
    """

    cluster: Cluster
    key: str  # marks the processes of this runner, see leftovers
    links: Links = Links()
    interface: str  # over which nodes talk
    store_address: str  # of the rendezvous store
    has_links: ClassVar[bool]

    _runs = 0

    def __enter__(self) -> Self:
        """Remove leftovers of earlier runs, and create what the nodes need."""
        leftovers.remove()
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027  # nothing on loopback
        """Remove what was created."""

    @property
    def rate(self) -> int | None:
        """The rate at which a node sends, bit/s; None for no limit."""
        return self.links.up.rate

    def delay_line_usage(self) -> Usage | None:
        """Return the work of the process that delays packets; None if there is none."""
        return None

    def _open_store(self) -> "TCPStore":
        """Create a store that all nodes can reach."""
        return host_store(self.store_address)

    def _entry(self, node: int) -> Entry:
        """Return the namespaces of a node."""
        return Entry()

    @abstractmethod
    def _set_link(self, node: int, up: bool) -> None:
        """Take the link of a node up or down."""

    def validate(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Raise the ValueError that :meth:`run` would, without running or creating anything."""
        launch.require_executable(command, {**os.environ, **(env or {})})
        require_no_overlap(faults)
        for each in faults:
            each.validate(self.cluster)
            if isinstance(each, Cut) and not self.has_links:
                raise ValueError(
                    f"cut: got node {each.node}, but nodes on loopback have no links; use Lab"
                )

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        faults: Sequence[Fault] = (),
        keep_going: bool = False,
        log_dir: str | Path | None = None,
        on_line: OnLine = discard_line,
    ) -> int:
        """Run ``command`` on every rank, and return when all ranks have ended.

        The ranks get the environment variables that torchrun sets; this process hosts the store,
        so that it outlives every rank. ``env`` is added to the environment of this process.
        ``on_line`` is called with the rank and each line that it prints, and with None for
        messages of the lab; never from two threads at once. With ``log_dir`` each rank writes to
        a file in that folder instead. ``faults`` are injected at their times.

        Returns the exit code of the first rank that failed (128 + n for signal n), else 0. After
        a failure the other ranks are terminated, unless ``keep_going``, which ``Kill`` implies. A
        rank killed by a fault has not failed. Raises ValueError for an invalid argument, before
        anything is started.
        """
        self.validate(command, env=env, faults=faults)
        base = {**os.environ, **(env or {})}
        output = Output(on_line, Path(log_dir) if log_dir is not None else None)
        store = self._open_store()
        before = self.delay_line_usage()
        shared = self._environment(base, store)
        with launch.RankProcesses(output, self.key) as processes:
            for rank in range(self.cluster.size):
                node = self.cluster.node_of(rank)
                environment = {**shared, **self.cluster.environment(rank)}
                processes.start(command, environment, node, self._entry(node))
            control = RunControl(self._set_link, processes.signal_node, processes.kill, output.log)
            with injected(faults, control):
                code = processes.supervise(keep_going or any(isinstance(f, Kill) for f in faults))
        if before is not None and (after := self.delay_line_usage()) is not None:
            output.log(str(after.since(before)))
        output.raise_error()
        return code

    def _environment(self, base: Mapping[str, str], store: "TCPStore") -> dict[str, str]:
        """Return the environment variables that are the same on all ranks."""
        self._runs += 1
        return {
            "OMP_NUM_THREADS": "1",  # several ranks share the cores, as with torchrun
            "PYTHONUNBUFFERED": "1",  # keeps what a rank printed before it was killed
            **base,
            "MASTER_ADDR": self.store_address,
            "MASTER_PORT": str(store.port),
            "GLOO_SOCKET_IFNAME": self.interface,
            # The launcher hosts the store: rank 0 is a client of it, as all other ranks are.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"{self.key}-{self._runs}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "ROLE_NAME": "default",
            leftovers.MARK: self.key,
        }


@final
class Loopback(Runner):
    """Runs commands over the loopback interface: no root needed, no rate limit, no links to cut.

    Ranks get the same environment variables as in :class:`~offbeat.lab.Lab`.
    """

    interface = "lo"
    store_address = "127.0.0.1"
    has_links = False

    def __init__(self, nodes: int, procs_per_node: int | Sequence[int] = 1) -> None:
        """Validate the arguments."""
        self.cluster = Cluster.of(nodes, procs_per_node)
        self.key = leftovers.key(id(self))

    def _set_link(self, node: int, up: bool) -> None:
        raise AssertionError("validate() rejects cuts on loopback")


def host_store(address: str) -> "TCPStore":
    """Create a store in this process that listens on a free port of ``address`` only."""
    from torch.distributed import TCPStore  # the options of a lab are read without torch

    # With a socket of ours: by itself, TCPStore listens on every address of the machine.
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    descriptor = listening.detach()
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
