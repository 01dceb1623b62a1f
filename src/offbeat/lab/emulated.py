"""Runs on emulated nodes, in network namespaces."""

from collections.abc import Sequence
from typing import Self, final

from torch.distributed import TCPStore

from offbeat.kit.quantity import parse_rate
from offbeat.lab import iproute, leftovers, network
from offbeat.lab.cluster import Cluster
from offbeat.lab.launch import Entry
from offbeat.lab.network import MAX_RATE, Network
from offbeat.lab.runner import Runner, host_store


@final
class Lab(Runner):
    """Runs commands on emulated nodes, each in a network namespace behind a link of limited rate.

    ``procs_per_node`` is one number for all nodes, or one per node. ``rate`` is that of every
    link in each direction, for example "250mbit"; None for no limit. Needs root, iproute2 and,
    for a rate, the tbf queueing discipline of the kernel; entering the context raises
    :class:`~offbeat.lab.Unavailable` (a ValueError) if one is missing. The rate applies to
    sockets: to Gloo, but not to NCCL between GPUs of one machine.

        with Lab(nodes=4, rate="250mbit") as lab:
            code = lab.run(["python", "train.py"], on_line=lambda rank, line: print(rank, line))
    """

    interface = network.INTERFACE
    store_address = network.HUB
    has_links = True

    def __init__(
        self, nodes: int, procs_per_node: int | Sequence[int] = 1, rate: str | None = None
    ) -> None:
        """Validate the arguments; entering the context creates the network."""
        self.cluster = Cluster.of(nodes, procs_per_node)
        self.rate = None if rate is None else parse_rate(rate, MAX_RATE)
        self.key = leftovers.key(id(self))
        self._network = Network(leftovers.namespaces_prefix(self.key), nodes, self.rate)

    def __enter__(self) -> Self:
        """Remove leftovers of earlier labs, and create the network."""
        iproute.require()
        super().__enter__()
        try:
            self._network.build()
        except BaseException:
            network.remove(self._network.namespaces)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the network."""
        network.remove(self._network.namespaces)

    def _open_store(self) -> TCPStore:
        if not (network.FOLDER / self._network.hub).exists():
            raise ValueError(
                "this lab has no network; enter its context first: with Lab(nodes=4) as lab: ..."
            )
        return self._network.in_hub(lambda: host_store(self.store_address))

    def _entry(self, node: int) -> Entry:
        path = network.FOLDER / self._network.namespace(node)
        return Entry(str(path), self._network.hosts(node))

    def _set_link(self, node: int, up: bool) -> None:
        self._network.set_link(node, up)
