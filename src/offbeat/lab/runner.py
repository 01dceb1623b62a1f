"""Where ranks run, and one run of a command there."""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from torch.distributed import TCPStore

from offbeat.lab import fault, launch, leftovers
from offbeat.lab.cluster import Cluster
from offbeat.lab.fault import Fault, Reach
from offbeat.lab.faults import Cut, Kill
from offbeat.lab.launch import Entry
from offbeat.lab.output import OnLine, Output


def silent(rank: int | None, line: str) -> None:
    """Drop a line of output."""


class Runner(ABC):
    """Runs commands on the ranks of ``world``, one run after the other; a context manager.

    :class:`~offbeat.lab.Lab` emulates a network, :class:`~offbeat.lab.Loopback` does without.
    """

    world: Cluster
    key: str  # marks its processes, see leftovers
    rate: int | None = None  # bit/s of every node's link, each way
    interface: ClassVar[str]
    store_address: ClassVar[str]  # where ranks find the store
    has_links: ClassVar[bool]

    _runs = 0

    @abstractmethod
    def __enter__(self) -> Self:
        """Make the place, after what an earlier lab left behind is removed."""

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the place."""

    @abstractmethod
    def _store(self) -> TCPStore:
        """A new store that all nodes reach."""

    @abstractmethod
    def _entry(self, node: int) -> Entry:
        """How a rank gets into a node."""

    @abstractmethod
    def _set_link(self, node: int, up: bool) -> None:
        """Take a node's link up or down."""

    def check(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Raise the ValueError that :meth:`run` would, before the place is made."""
        launch.require(command, {**os.environ, **(env or {})})
        for each in faults:
            each.check(self.world)
            if isinstance(each, Cut) and not self.has_links:
                raise ValueError(
                    f"cut: got node {each.node}, but on loopback nodes have no links; run in a Lab"
                )

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        faults: Sequence[Fault] = (),
        keep_going: bool = False,
        log_dir: str | Path | None = None,
        on_line: OnLine = silent,
    ) -> int:
        """Run ``command`` on every rank, and return when all have ended.

        Ranks find in their environment what torchrun would set, and the store is this process's:
        it outlives every rank. ``env`` is added to this process's own environment. ``on_line`` is
        called with the rank and each line it prints, with None for what the lab has to say;
        never by two threads at once. With ``log_dir`` each rank prints to a file there instead.

        Returns the exit code of the first rank that failed (128 + n for signal n), else 0; the
        others are then ended, unless ``keep_going``, which ``Kill`` implies. A rank killed on
        purpose has not failed. Raises ValueError before anything starts if an argument is wrong.
        """
        self.check(command, env=env, faults=faults)
        base = {**os.environ, **(env or {})}
        output = Output(on_line, Path(log_dir) if log_dir is not None else None)
        store = self._store()  # of this process: it outlives every rank
        shared = self._environment(base, store)
        with launch.Crew(output, self.key) as crew:
            for rank in range(self.world.size):
                node = self.world.node_of(rank)
                environment = {**shared, **self.world.environment(rank)}
                crew.start(command, environment, node, self._entry(node))
            reach = Reach(self._set_link, crew.signal_node, crew.kill, output.tell)
            with fault.scheduled(faults, reach):
                code = crew.supervise(keep_going or any(isinstance(f, Kill) for f in faults))
        output.raise_error()
        return code

    def _environment(self, base: Mapping[str, str], store: TCPStore) -> dict[str, str]:
        """What all ranks share."""
        self._runs += 1
        return {
            "OMP_NUM_THREADS": "1",  # many ranks share few cores
            "PYTHONUNBUFFERED": "1",  # what a rank printed before it was killed has arrived
            **base,
            "MASTER_ADDR": self.store_address,
            "MASTER_PORT": str(store.port),
            "GLOO_SOCKET_IFNAME": self.interface,
            # The launcher hosts the store: rank 0 is a client like all others.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": f"{self.key}-{self._runs}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "ROLE_NAME": "default",
            leftovers.MARK: self.key,
        }


def host_store(address: str) -> TCPStore:
    """A store of this process that listens at ``address``, at any free port."""
    # A socket of our own: left alone, a store listens on every address of the machine.
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    descriptor = listening.detach()
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
