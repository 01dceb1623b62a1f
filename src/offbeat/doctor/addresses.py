"""The checks of this machine's network: interfaces, the address of a rank, names and ports."""

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from offbeat.doctor.finding import Finding
from offbeat.kit import quantity

_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_SYS = Path("/proc/sys/net/ipv4")
SLOW = 1.0  # seconds of a look-up of a name
PATIENCE = 15.0  # seconds after which a look-up is not waited for
VARIABLE = "GLOO_SOCKET_IFNAME"


def addresses(is_distributed: bool) -> Iterator[Finding]:
    """Check what ranks on this machine need to connect to others."""
    names = [name for _, name in socket.if_nameindex()]
    found = {name: address for name in names if (address := interface_address(name))}
    if not is_distributed:
        texts = [f"{name} {address} (MTU {_mtu(name)})" for name, address in found.items()]
        yield Finding("interfaces", "ok", "; ".join(texts))
    yield _own_address(found, is_distributed)
    yield from _small_packets(found)
    yield _names()
    yield _ports()
    yield _congestion_control()


def own_address() -> str:
    """Return the address on which Gloo listens: of the interface, or of the name of the host.

    Raises ``OSError`` if there is none.
    """
    if name := os.environ.get(VARIABLE, "").split(",")[0]:
        if address := interface_address(name):
            return address
        raise OSError(f"{VARIABLE}={name} has no IPv4 address")
    return socket.gethostbyname(socket.gethostname())


def port_range() -> str:
    """Return the first and the last port on which ranks listen."""
    return "-".join((_SYS / "ip_local_port_range").read_text().split())


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of an interface, if it has one."""
    try:
        return socket.inet_ntoa(_ask(_SIOCGIFADDR, name)[20:24])
    except OSError:
        return None


def _mtu(name: str) -> int:
    (mtu,) = struct.unpack("16xi", _ask(_SIOCGIFMTU, name)[:20])
    return int(mtu)


def _ask(what: int, interface: str) -> bytes:
    """Ask the kernel; files below /sys may be those of another network namespace."""
    request = struct.pack("256s", os.fsencode(interface)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return fcntl.ioctl(asking, what, request)


def _own_address(found: dict[str, str], is_distributed: bool) -> Finding:
    others = [name for name, address in found.items() if not address.startswith("127.")]
    fix = f"set {VARIABLE} to the interface that leads to the other nodes"
    if others:
        fix += f": {' or '.join(others)}"
    try:
        address = own_address()
    except OSError as error:
        return Finding("address", "error", f"no address to listen on: {error}", fix)
    if not address.startswith("127.") or not others:
        return Finding("address", "ok", f"ranks listen on {address}")
    text = f"ranks listen on {address}, which other nodes cannot reach"
    return Finding("address", "warning" if is_distributed else "note", text, fix)


def _small_packets(found: dict[str, str]) -> Iterator[Finding]:
    fix = "a tunnel? messages then take more packets; raise the MTU if the path allows it"
    for name in found:
        if (mtu := _mtu(name)) < 1400:
            yield Finding("MTU", "warning", f"packets on {name} are at most {mtu} bytes", fix)


def _names() -> Finding:
    """Time the look-ups that torch makes at every connection."""
    host = socket.gethostname()
    seconds = _time(lambda: socket.getaddrinfo(host, None))
    address = (os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
    try:
        numeric = socket.getaddrinfo(*address, family=socket.AF_INET)[0][4]
    except OSError:
        numeric = ("127.0.0.1", 0)
    backwards = _time(lambda: socket.getnameinfo(numeric, socket.NI_NAMEREQD))
    worst = max(seconds, backwards)
    if worst < SLOW:
        return Finding("host names", "ok", "looked up quickly")
    text = f"{host} took {quantity.seconds(seconds)}, {numeric[0]} {quantity.seconds(backwards)}"
    return Finding(
        "host names",
        "warning",
        f"looked up slowly: {text}. torch looks up names at each connection, so starting and "
        "joining take longer under every method",
        f'echo "::ffff:{numeric[0]} {host}" >> /etc/hosts, on every node, or mend the name servers '
        "in /etc/resolv.conf",
    )


def _time(look_up: Callable[[], object]) -> float:
    """Return the seconds of a call, whether or not it finds something; at most PATIENCE."""

    def run() -> None:
        with contextlib.suppress(OSError):
            look_up()
        done.set()

    done, start = threading.Event(), time.perf_counter()
    threading.Thread(target=run, daemon=True).start()
    done.wait(PATIENCE)
    return time.perf_counter() - start


def _ports() -> Finding:
    """Connect to ourselves, on a port such as ranks take."""
    try:
        address = own_address()
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname(), 3).close()
    except OSError as error:
        fix = f"allow TCP connections to the ports {port_range()}; ulimit -n shows a limit of files"
        return Finding("ports", "error", f"this machine cannot connect to itself: {error}", fix)
    return Finding("ports", "ok", f"ranks listen on ports in {port_range()}")


def _congestion_control() -> Finding:
    found = (_SYS / "tcp_congestion_control").read_text().strip()
    if found != "bbr":
        return Finding("congestion control", "ok", found)
    fix = "sysctl -w net.ipv4.tcp_congestion_control=cubic; sgp and d_psgd suffer from BBR"
    return Finding("congestion control", "warning", found, fix)
