"""TAP devices: network interfaces whose frames a process reads and writes."""

import fcntl
import os
import struct
from pathlib import Path

from offbeat.lab.network.iproute import Unavailable

_DEVICE = Path("/dev/net/tun")
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# Checksums, and segments of TCP over IPv4 and IPv6, also with ECN: left for the reader to compute.
_OFFLOADS = 0x01 | 0x02 | 0x04 | 0x08


def open_tap(name: str) -> int:
    """Create a TAP device in the network namespace of the calling thread; return its descriptor.

    The device disappears when the descriptor is closed. A frame holds up to 64 KiB of a TCP stream.
    Raises :class:`~offbeat.lab.Unavailable` without the TUN driver, or the permission to use it.
    """
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    except OSError as error:
        raise Unavailable(
            "latency and loss need netem, which this kernel does not have, or TUN devices, which "
            f"cannot be used ({_DEVICE}: {error.strerror}); load one with: modprobe sch_netem, or "
            f"modprobe tun; start a container with --privileged, or --device {_DEVICE}"
        ) from error
    return device
