"""A server that answers from a thread of its own, also while another holds Python's lock.

It is torch's TCPStore. Its client would wait for an answer, so questions are sent over plain
sockets: of its protocol we use the greeting and the question whether a key exists, which are the
same in torch 2.10 to 2.15. Whoever opens a server asks it once, and does without it if it is mute.
"""

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import TCPStore

HERE, NOT_HERE = b"\0", b"\1"  # answers
GREETING = struct.pack("<BI", 0, 0x3C85F7CE)  # first on every connection; not answered
LOOPBACK = "127.0.0.1"
LIMIT = 2.0  # seconds for the first answer


def question(key: str) -> bytes:
    """Return the message that asks whether ``key`` exists; the answer is one byte."""
    name = f"/{key}".encode()  # as the client of torch names it
    return struct.pack("<BQQ", 5, 1, len(name)) + name


def open_server(is_ipv6: bool = False) -> TCPStore | None:
    """Start a server on a free port of all interfaces; None if it answers no question."""
    # It looks up the name of whoever connects, for its log. Files of host names have IPv4 addresses
    # as such, and not in the notation of IPv6 that they have on sockets for both.
    with contextlib.suppress(RuntimeError, OSError):
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        listening = socket.create_server(("", 0), family=family, dualstack_ipv6=is_ipv6)
        port, limit = listening.getsockname()[1], timedelta(seconds=LIMIT)
        server = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=limit,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        server.set("open", "")
        with socket.create_connection((LOOPBACK, port), LIMIT) as client:
            client.sendall(GREETING + question("open") + question("closed"))
            if client.recv(1) + client.recv(1) == HERE + NOT_HERE:
                return server
    return None


def leave_server_to_parent(server: TCPStore) -> None:
    """Close the sockets of ``server`` in a forked child: they would outlive its parent."""
    # Its end would take sockets out of what the thread of the parent polls: it must not come.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    for descriptor, ports in ports_of_sockets().items():
        if server.port in ports:
            os.close(descriptor)


def ports_of_sockets() -> dict[int, list[int]]:
    """Return the port of each socket of this process, and that of its peer if it has one."""
    found = {}
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the listing's own, or closed meanwhile
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as same:
                    ends = [same.getsockname()]
                    with contextlib.suppress(OSError):  # it listens
                        ends.append(same.getpeername())
                found[descriptor] = [end[1] for end in ends if isinstance(end, tuple)]
    return found


def own_hosts(sockets: Iterable[int]) -> list[str]:
    """Return this machine's ends of ``sockets``, by which others may reach it, best first."""
    # A connection to this machine itself may have the loopback address as its end, which is of no
    # use elsewhere: that of the interface with the default route follows.
    found: dict[str, None] = {}
    for descriptor in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
            found[same.getsockname()[0].removeprefix("::ffff:")] = None
    if any(host == "::1" or host.startswith("127.") for host in found):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as route:
            route.connect(("192.0.2.1", 9))  # nothing is sent
            found[route.getsockname()[0]] = None
    return list(found)
