"""The round trip to the farthest peer, as the kernel has measured it."""

import contextlib
import os
import socket
import struct

from offbeat.platform.answering import ports_of_sockets

FAR = 0.01  # seconds: from there on, hops of a message cost more than the links that it shares
_PLACE, _UNKNOWN = 148, 2**32 - 1  # of the least round trip in Linux' tcp_info, in microseconds


def round_trip() -> float:
    """Return the least round trip of that connection of this process whose least is the longest.

    In seconds; 0 without connections, or where the kernel does not tell. Waits in queues, of other
    load on the links or this machine, do not count.
    """
    if (what := getattr(socket, "TCP_INFO", None)) is None:
        return 0.0
    found = [0]
    for descriptor, ports in ports_of_sockets().items():
        if len(ports) == 2:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
                info = same.getsockopt(socket.IPPROTO_TCP, what, _PLACE + 4)
                if len(info) == _PLACE + 4:
                    found += struct.unpack_from("=I", info, _PLACE)
    return max(least for least in found if least != _UNKNOWN) / 1e6
