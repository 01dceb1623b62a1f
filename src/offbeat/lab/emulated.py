"""Runs on emulated nodes, in network namespaces."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, Unpack, final

from offbeat.lab import leftovers
from offbeat.lab.cluster import Cluster
from offbeat.lab.launch import Entry
from offbeat.lab.network import iproute, network
from offbeat.lab.network.delaying import Usage
from offbeat.lab.network.links import LinkOptions, Links
from offbeat.lab.network.network import Network
from offbeat.lab.runner import Runner, host_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore


@final
class Lab(Runner):
    """Runs commands on emulated nodes, each in a network namespace behind a link of limited rate.

    Needs root, iproute2 and, for a rate, the tbf queueing discipline of the kernel; for latency,
    its netem or TUN devices. Entering the context raises :class:`~offbeat.lab.Unavailable` (a
    ValueError) if one is missing. Links apply to sockets: to Gloo, but not to NCCL between GPUs of
    one machine.

    ``procs_per_node`` is one number of ranks for all nodes, or one per node. The other arguments
    are text, as for ``offbeat lab``:

    - ``rate``: of every node's link in each direction, as "250mbit"; None for no limit.
    - ``up`` and ``down``: the rates at which a node sends and receives, instead of ``rate``.
    - ``latency``: the time of a packet from one node to another, half a round trip, as "50ms".
    - ``jitter``: how much the latency varies at most, either way, as "5ms".
    - ``loss``: the share of packets that are lost at random, as "0.1%".
    - ``sites``: the numbers of nodes of all sites. Jitter and loss are then those between sites.
    - ``between``: links of sites, as ["60ms@200mbit"] for all pairs, "0-2:75ms@100mbit" for one.
    - ``encrypt``: True lets nodes talk through WireGuard, which must be installed.

        with Lab(nodes=4, rate="250mbit", latency="50ms") as lab:
            code = lab.run(["python", "train.py"], on_line=lambda rank, line: print(rank, line))
    """

    has_links = True

    def __init__(
        self,
        nodes: int,
        procs_per_node: int | Sequence[int] = 1,
        rate: str | None = None,
        **far: Unpack[LinkOptions],
    ) -> None:
        """Validate the arguments; entering the context creates the network."""
        self.cluster = Cluster.of(nodes, procs_per_node)
        self.links = Links.parse(rate, **far)
        self.links.require_nodes(nodes)
        self.key = leftovers.key(id(self))
        self._network = Network(leftovers.namespaces_prefix(self.key), nodes, self.links)
        self.interface, self.store_address = self._network.interface, self._network.hub_address

    def __enter__(self) -> Self:
        """Remove leftovers of earlier labs, and create the network."""
        iproute.require()
        super().__enter__()
        try:
            self._network.build()
        except BaseException:
            self._network.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the network."""
        self._network.remove()

    def delay_line_usage(self) -> Usage | None:
        """Return the work of the delay line since the context was entered."""
        line = self._network.delay_line
        return None if line is None else line.usage()

    def _open_store(self) -> "TCPStore":
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
