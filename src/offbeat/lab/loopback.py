"""Ranks on this machine's loopback."""

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
    """The same ranks on this machine's loopback: no root, no limit, nodes in name only."""

    interface = "lo"
    store_address = "127.0.0.1"
    has_links = False

    def __init__(self, nodes: int, procs_per_node: int | Sequence[int] = 1) -> None:
        """Check the arguments."""
        self.world = Cluster.of(nodes, procs_per_node)
        self.key = leftovers.key(id(self))

    def __enter__(self) -> Self:
        """End what an earlier run left behind."""
        leftovers.remove()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing was made."""

    def _store(self) -> TCPStore:
        return host_store(self.store_address)

    def _entry(self, node: int) -> Entry:
        return Entry()

    def _set_link(self, node: int, up: bool) -> None:
        raise AssertionError("runs with cuts are refused")
