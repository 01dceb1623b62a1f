"""A network of emulated nodes: namespaces, one bridge, and a token bucket on every link.

Each node is a network namespace with one interface, the near end of a veth pair. The far ends
are ports of a bridge in a separate namespace, the hub. Nothing is added to the machine's own
network namespace: its routes and firewall do not interfere, and two labs can use the same
addresses.

``tc tbf`` on the near end limits what a node sends, on the far end what it receives. Traffic
between ranks of one node is addressed to its own namespace; the kernel delivers it over loopback,
without passing the token bucket. The store is in the hub: its traffic, a few bytes, shares the
links of the nodes, as with a store on another machine.
"""

import contextlib
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeVar, final

from offbeat.lab import iproute
from offbeat.lab.enter import join_network, name_hosts

Result = TypeVar("Result")

FOLDER = Path("/run/netns")  # where iproute2 keeps named namespaces
INTERFACE = "eth0"  # every node's, in its own namespace
_NETWORK = IPv4Address("10.98.0.0")
HUB = str(_NETWORK + 254)  # where all nodes reach the hub
# The kernel passes segments of up to 64 kB, many packets in one, to the token bucket. A bucket
# smaller than a segment does not reach its rate; after a pause, one of this size lets 128 KiB pass
# above the rate.
_BURST = 128 * 1024
_BURST_SECONDS = 1e-3
# How long a packet may queue in a link before packets are dropped, similar to the buffer of a
# switch. Gloo fills it only where several nodes send to one; that reaches line rate too.
_QUEUE_SECONDS = 0.05
MAX_RATE = 600  # gbit: tc holds the bytes of that queue in 32 bits
# The congestion control of nodes: Linux's default, whatever the machine is configured to use.
# Under BBR, which paces by its estimate of the line rate, sgp(overlap=1) took 0.51 s per step at
# 250 Mbit/s; it takes 0.45 s under cubic, and 0.44 s is the lower bound.
_CONGESTION = "cubic"
_KNOWN = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


@final
@dataclass(frozen=True)
class Network:
    """A network of ``nodes`` namespaces, named ``name``-0, ``name``-1, ..., around a hub."""

    name: str
    nodes: int
    rate: int | None = None  # bit/s of every link in each direction

    @property
    def hub(self) -> str:
        """The namespace of the bridge and of the store."""
        return f"{self.name}-hub"

    def namespace(self, node: int) -> str:
        """Return the name of a node's namespace."""
        return f"{self.name}-{node}"

    @property
    def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        return [self.hub, *map(self.namespace, range(self.nodes))]

    def build(self) -> None:
        """Create namespaces, bridge, links and token buckets, in 0.1 s for 8 nodes.

        Raises :class:`~offbeat.lab.iproute.Unavailable` if this machine or user cannot.
        """
        iproute.batch("ip", [f"netns add {name}" for name in self.namespaces])
        links = [self._link(node) for node in range(self.nodes)]
        bridge = [
            "link set lo up",
            "link add bridge type bridge",
            f"addr add {HUB}/24 dev bridge",
            "link set bridge up",
        ]
        iproute.batch("ip", [*bridge, *(line for lines in links for line in lines)], self.hub)
        for node in range(self.nodes):
            address = f"addr add {_address(node)}/24 dev {INTERFACE}"
            up = ["link set lo up", f"link set {INTERFACE} up"]
            iproute.batch("ip", [address, *up, *_congestion(node)], self.namespace(node))
        if self.rate is not None:
            self._shape(self.rate)

    def _link(self, node: int) -> list[str]:
        # Both ends are created inside their namespaces, never in the machine's own.
        peer = f"peer name {INTERFACE} netns {self.namespace(node)}"
        return [
            f"link add {_port(node)} type veth {peer}",
            f"link set {_port(node)} master bridge up",
        ]

    def _shape(self, rate: int) -> None:
        burst = max(_BURST, round(rate / 8 * _BURST_SECONDS))
        limit = burst + round(rate / 8 * _QUEUE_SECONDS)
        bucket = f"root tbf rate {rate}bit burst {burst}b limit {limit}b"
        ports = [f"qdisc add dev {_port(node)} {bucket}" for node in range(self.nodes)]
        iproute.batch("tc", ports, self.hub)
        for node in range(self.nodes):
            iproute.batch("tc", [f"qdisc add dev {INTERFACE} {bucket}"], self.namespace(node))

    def set_link(self, node: int, up: bool) -> None:
        """Take a node's link down or up, as if its cable were unplugged or plugged in.

        This sets the hub's end: the node loses its carrier, but keeps its address and routes.
        """
        iproute.batch("ip", [f"link set {_port(node)} {'up' if up else 'down'}"], self.hub)

    def hosts(self, node: int | None) -> str:
        """Return lines for /etc/hosts on a node, or in the hub if ``node`` is None.

        On a node the machine's host name resolves to that node. The IPv6 notation of the hub's
        address is included since torch looks it up.
        """
        names = [(HUB, "hub"), (f"::ffff:{HUB}", "hub-ipv6")]
        names += [(str(_address(other)), f"node{other}") for other in range(self.nodes)]
        names += [] if node is None else [(str(_address(node)), socket.gethostname())]
        return "".join(f"{address} {name}\n" for address, name in names)

    def in_hub(self, make: Callable[[], Result]) -> Result:
        """Call ``make`` in a thread inside the hub's namespace, and return its result.

        Sockets that it opens and threads that it starts stay in that namespace.
        """

        def enter() -> Result:
            with open(FOLDER / self.hub) as namespace:
                join_network(namespace.fileno())
            name_hosts(self.hosts(None))
            return make()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter).result()


def remove(namespaces: Sequence[str]) -> None:
    """Delete the namespaces that exist, with their interfaces."""
    existing = [name for name in namespaces if (FOLDER / name).exists()]
    with contextlib.suppress(iproute.Unavailable):  # another lab may remove the same leftovers
        if existing:
            iproute.batch("ip", [f"netns del {name}" for name in existing], force=True)


def _address(node: int) -> IPv4Address:
    return _NETWORK + 1 + node


def _congestion(node: int) -> list[str]:
    # By route: in a namespace the sysctl accepts only the unrestricted algorithms.
    if _CONGESTION not in _KNOWN.read_text("ascii").split():
        return []
    link = f"{_NETWORK}/24 dev {INTERFACE} proto kernel scope link src {_address(node)}"
    return [f"route replace {link} congctl {_CONGESTION}"]


def _port(node: int) -> str:
    return f"node{node}"
