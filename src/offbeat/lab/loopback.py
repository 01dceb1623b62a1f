"""Runs over the loopback interface."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self, final

from torch.distributed import TCPStore

from offbeat.lab import leftovers
from offbeat.lab.cluster import Cluster
from offbeat.lab.launch import Entry
from offbeat.lab.runner import Runner, host_store


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

    def __enter__(self) -> Self:
        """Terminate processes that earlier runs have left."""
        leftovers.remove()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Return at once: entering the context creates nothing."""

    def _open_store(self) -> TCPStore:
        return host_store(self.store_address)

    def _entry(self, node: int) -> Entry:
        return Entry()

    def _set_link(self, node: int, up: bool) -> None:
        raise AssertionError("validate() rejects cuts on loopback")
