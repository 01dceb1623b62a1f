"""A network of emulated nodes: namespaces, one bridge for each site, and the links between them.

Each node is a network namespace with one interface. The other ends of their links are ports of a
bridge in a separate namespace, the hub; with sites, of one bridge for each site. Nothing is added
to the machine's own network namespace: its routes and firewall do not interfere, and two labs can
use the same addresses.

A link is a veth pair. ``tc tbf`` on the near end limits what a node sends, on the far end what it
receives. Traffic between ranks of one node is addressed to its own namespace; the kernel delivers
it over loopback, without passing the token bucket. The store is in the hub: its traffic, a few
bytes, shares the links of the nodes, as with a store on another machine, at the first site.

Latency, jitter and loss apply to what a node receives: netem is then on the far end too. In a
kernel without netem the link is a pair of TAP devices, which the delay line connects. The bridges
of two sites are connected by such a link in both directions. Its ports are isolated: the bridge
does not pass frames from one site on to a third.

With encryption, nodes and hub reach each other through tunnels over these links, at addresses of
their own.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple, TypeVar, final

from offbeat.lab.enter import join_network, name_hosts
from offbeat.lab.network import iproute, shaping, tunnels
from offbeat.lab.network.delaying import DelayLine, Hop, open_tap
from offbeat.lab.network.links import Links
from offbeat.lab.network.tunnels import Place, Tunnels
from offbeat.lab.network.wire import Wire

Result = TypeVar("Result")

FOLDER = Path("/run/netns")  # where iproute2 keeps named namespaces
INTERFACE = "eth0"  # every node's, in its own namespace
_NETWORK = IPv4Address("10.98.0.0")
_ENCRYPTED = IPv4Address("10.99.0.0")
_HUB = 254  # the last number of its address
# The congestion control of nodes: Linux's default, whatever the machine is configured to use.
# Under BBR, which paces by its estimate of the line rate, sgp(overlap=1) took 0.51 s per step at
# 250 Mbit/s; it takes 0.45 s under cubic, and 0.44 s is the lower bound.
_CONGESTION = "cubic"
_KNOWN = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class End(NamedTuple):
    """One device of a link, and what happens to the frames that it sends."""

    namespace: str
    device: str
    wire: Wire


@final
@dataclass
class Network:
    """A network of ``nodes`` namespaces, named ``name``-0, ``name``-1, ..., around a hub."""

    name: str
    nodes: int
    links: Links = field(default_factory=Links)
    delay_line: DelayLine | None = None  # None without latency, or with netem
    tunnels: Tunnels | None = None

    @property
    def hub(self) -> str:
        """The namespace of the bridge and of the store."""
        return f"{self.name}-hub"

    def namespace(self, node: int) -> str:
        """Return the name of a node's namespace."""
        return f"{self.name}-{node}"

    @property
    def interface(self) -> str:
        """The interface of every node through which it reaches the others."""
        return tunnels.INTERFACE if self.links.encrypt else INTERFACE

    @property
    def hub_address(self) -> str:
        """Where all nodes reach the hub."""
        return str(self._address(_HUB))

    @property
    def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        return [self.hub, *map(self.namespace, range(self.nodes))]

    def build(self) -> None:
        """Create namespaces, bridges, links and what limits them, in 0.1 s for 8 nodes.

        Raises :class:`~offbeat.lab.Unavailable` if this machine or user cannot.
        """
        iproute.batch("ip", [f"netns add {name}" for name in self.namespaces])
        sites = range(max(1, len(self.links.sites)))
        bridges = [f"link add {_bridge(site)} type bridge" for site in sites]
        up = [f"link set {_bridge(site)} up" for site in sites]
        address = f"addr add {_NETWORK + _HUB}/24 dev {_bridge(0)}"
        iproute.batch("ip", ["link set lo up", *bridges, address, *up], self.hub)
        ends = self._ends()
        by_taps = self.links.delays and not shaping.has_netem(self.hub)
        taps = [two for two in ends if by_taps and any(end.wire.delays for end in two)]
        iproute.batch("ip", [_veth(*two) for two in ends if two not in taps], self.hub)
        if taps:
            with ExitStack() as opened:
                self.delay_line = DelayLine(self._open_taps(taps, opened))
        self._attach()
        self._shape(end for two in ends for end in two)
        if self.links.encrypt:
            self.tunnels = Tunnels([self._place(number) for number in (*range(self.nodes), _HUB)])
            self._limit_tunnels()

    def _ends(self) -> list[tuple[End, End]]:
        """Return the two devices of every link, with what happens to frames that they send."""
        links, hub = self.links, self.hub
        near = [
            (End(self.namespace(node), INTERFACE, links.up), End(hub, _port(node), links.down))
            for node in range(self.nodes)
        ]
        return near + [
            (End(hub, _far(a, b), wire), End(hub, _far(b, a), wire))
            for (a, b), wire in links.far.items()
        ]

    def _open_taps(self, ends: Sequence[tuple[End, End]], opened: ExitStack) -> list[Hop]:
        """Create both devices of every link, and return the way between them in each direction."""
        hops: list[Hop] = []
        for two in ends:
            first, second = (inside(end.namespace, partial(open_tap, end.device)) for end in two)
            for device in (first, second):
                opened.callback(os.close, device)
            hops += [Hop(first, second, two[0].wire), Hop(second, first, two[1].wire)]
        return hops

    def _attach(self) -> None:
        """Make links ports of the bridges, and give nodes their addresses."""
        ports = {_port(node): self.links.site_of(node) for node in range(self.nodes)}
        far = {_far(a, b): a for pair in self.links.far for a, b in (pair, pair[::-1])}
        lines = [f"link set {p} master {_bridge(site)} up" for p, site in (ports | far).items()]
        lines += [f"link set {port} type bridge_slave isolated on" for port in far]
        iproute.batch("ip", lines, self.hub)
        # Segments of TCP are lost as a whole: they may hold one packet only.
        single = any(wire.loss for wire in self.links.wires)
        for node in range(self.nodes):
            address = f"addr add {_NETWORK + 1 + node}/24 dev {INTERFACE}"
            up = ["link set lo up", f"link set {INTERFACE} up"]
            up += [f"link set {INTERFACE} gso_max_segs 1"] if single else []
            up += [f"route replace {route}" for route in _congestion(_NETWORK, node, INTERFACE)]
            iproute.batch("ip", [address, *up], self.namespace(node))

    def _address(self, number: int) -> IPv4Address:
        """Return the address of a node, or of the hub, as the others know it."""
        network = _ENCRYPTED if self.links.encrypt else _NETWORK
        return network + (number if number == _HUB else number + 1)

    def _place(self, number: int) -> Place:
        """Return where the tunnel of a node, or of the hub, ends."""
        name, inside = self.hub if number == _HUB else self.namespace(number), self._address(number)
        outside = _NETWORK + (int(inside) - int(_ENCRYPTED))
        routes = [] if number == _HUB else _congestion(_ENCRYPTED, number, tunnels.INTERFACE)
        return Place(FOLDER / name, outside, inside, *routes)

    def _shape(self, ends: Iterable[End]) -> None:
        lines: dict[str, list[str]] = {}
        for end in ends:
            delays = end.wire.delays and self.delay_line is None
            commands = shaping.netem(end.device, end.wire) if delays else []
            parent = "parent 1:1" if delays else "root"
            commands += shaping.bucket(end.device, end.wire, self.links.round_trip, parent)
            lines.setdefault(end.namespace, []).extend(commands)
        for namespace, commands in lines.items():
            if commands:
                iproute.batch("tc", commands, namespace)

    def _limit_tunnels(self) -> None:
        inside = tunnels.wire_inside(self.links.up)
        if commands := shaping.bucket(tunnels.INTERFACE, inside, self.links.round_trip):
            for node in range(self.nodes):
                iproute.batch("tc", commands, self.namespace(node))

    def remove(self) -> None:
        """End tunnels and the delay line, and delete the namespaces that exist."""
        if self.tunnels is not None:
            self.tunnels.stop()
            self.tunnels = None
        if self.delay_line is not None:
            self.delay_line.stop()
            self.delay_line = None
        remove(self.namespaces)

    def set_link(self, node: int, up: bool) -> None:
        """Take a node's link down or up, as if its cable were unplugged or plugged in.

        This sets the hub's end: the node loses its carrier, but keeps its address and routes.
        """
        iproute.batch("ip", [f"link set {_port(node)} {'up' if up else 'down'}"], self.hub)

    def hosts(self, node: int | None) -> str:
        """Return lines for /etc/hosts on a node, or in the hub if ``node`` is None.

        On a node the machine's host name resolves to that node. The IPv6 notations of the hub's
        address and of the loopback address are included since torch looks them up.
        """
        hub = self.hub_address
        names = [(hub, "hub"), (f"::ffff:{hub}", "hub-ipv6"), ("::ffff:127.0.0.1", "loopback-ipv6")]
        names += [(str(self._address(other)), f"node{other}") for other in range(self.nodes)]
        names += [] if node is None else [(str(self._address(node)), socket.gethostname())]
        return "".join(f"{address} {name}\n" for address, name in names)

    def in_hub(self, make: Callable[[], Result]) -> Result:
        """Call ``make`` in a thread inside the hub, where all nodes have names."""

        def named() -> Result:
            name_hosts(self.hosts(None))
            return make()

        return inside(self.hub, named)


def inside(namespace: str, make: Callable[[], Result]) -> Result:
    """Call ``make`` in a thread inside a network namespace, and return its result.

    Devices and sockets that it opens and threads that it starts stay in that namespace.
    """

    def enter() -> Result:
        with open(FOLDER / namespace) as file:
            join_network(file.fileno())
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


def remove(namespaces: Sequence[str]) -> None:
    """Delete the namespaces that exist, with their interfaces."""
    existing = [name for name in namespaces if (FOLDER / name).exists()]
    with contextlib.suppress(iproute.Unavailable):  # another lab may remove the same leftovers
        if existing:
            iproute.batch("ip", [f"netns del {name}" for name in existing], force=True)


def _congestion(network: IPv4Address, node: int, interface: str) -> list[str]:
    """Return the route of a node's interface that sets the congestion control, if there is it."""
    # By route: in a namespace the sysctl accepts only the unrestricted algorithms.
    if _CONGESTION not in _KNOWN.read_text("ascii").split():
        return []
    link = f"{network}/24 dev {interface} proto kernel scope link src {network + 1 + node}"
    return [f"{link} congctl {_CONGESTION}"]


def _veth(first: End, second: End) -> str:
    # Both ends are created inside their namespaces, never in the machine's own.
    return f"link add {second.device} type veth peer name {first.device} netns {first.namespace}"


def _bridge(site: int) -> str:
    return f"site{site}"


def _port(node: int) -> str:
    return f"node{node}"


def _far(site: int, other: int) -> str:
    return f"far{site}-{other}"
