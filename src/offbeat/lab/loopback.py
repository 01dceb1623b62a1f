"""Runs over the loopback interface."""

from collections.abc import Sequence
from typing import final

from offbeat.lab import leftovers
from offbeat.lab.cluster import Cluster
from offbeat.lab.runner import Runner


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
