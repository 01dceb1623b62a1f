"""The process of the delay line: the TAP devices whose frames it carries, its cost, its end."""

import fcntl
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import sub
from pathlib import Path
from typing import NamedTuple, final

from offbeat.lab import enter
from offbeat.lab.network import delay_line
from offbeat.lab.network.iproute import Unavailable
from offbeat.lab.network.wire import Wire

_DEVICE = Path("/dev/net/tun")
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
# Checksums, and segments of TCP over IPv4 and IPv6, also with ECN: left for the reader to compute.
_OFFLOADS = 0x01 | 0x02 | 0x04 | 0x08


class Hop(NamedTuple):
    """Two descriptors of TAP devices, and what happens to frames from the first to the second."""

    source: int
    target: int
    wire: Wire = Wire()


@final
@dataclass(frozen=True)
class Usage:
    """The work of the delay line over ``wall`` seconds.

    ``cpu`` are the seconds that it computed, networking in the kernel included. A frame counts
    once for each device that it is read from. ``late`` frames left more than 1 ms, or 5 % of the
    latency, after their time; ``dropped`` ones exceeded 256 MiB on the way in one direction.

    >>> print(Usage(cpu=1.0, wall=8.0, frames=8000, late=400, dropped=0))
    delay line: 12 % of a core, 1,000 frames per second, 5.0 % of them late: too slow a machine
    """

    cpu: float
    wall: float
    frames: int
    late: int
    dropped: int

    def since(self, earlier: "Usage") -> "Usage":
        """Return the work since ``earlier``."""
        return Usage(*map(sub, astuple(self), astuple(earlier)))

    @property
    def cores(self) -> float:
        """The mean number of cores in use."""
        return self.cpu / self.wall

    def __str__(self) -> str:
        late, dropped = (100 * n / max(1, self.frames) for n in (self.late, self.dropped))
        parts = [f"delay line: {100 * self.cores:.0f} % of a core"]
        parts += [f"{self.frames / self.wall:,.0f} frames per second"]
        parts += [f"{late:.1f} % of them late: too slow a machine"] if late > 1 else []
        parts += [f"{dropped:.1f} % of them dropped: set a rate"] if dropped else []
        return ", ".join(parts)


@final
class DelayLine:
    """The process that carries frames over ``hops``; the caller may close their descriptors.

    It ends with :meth:`stop`, or when the thread that has created it ends, also by SIGKILL.
    """

    def __init__(self, hops: Sequence[Hop]) -> None:
        """Start the process."""
        wires = [
            [hop.source, hop.target, hop.wire.latency, hop.wire.jitter, hop.wire.loss]
            for hop in hops
        ]
        carry = [sys.executable, "-I", "-S", delay_line.__file__, json.dumps(wires)]
        self._process = subprocess.Popen(
            enter.command_in("", "", carry),
            env={},  # without the mark of the ranks, which end with their run
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds={device for hop in hops for device in hop[:2]},
            start_new_session=True,  # Ctrl-C reaches only the lab
        )

    def usage(self) -> Usage:
        """Return the work since the start; raises RuntimeError if the process has ended."""
        process = self._process
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            process.stdin.write(b"?")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise RuntimeError(
                f"the delay line has ended with exit code {process.wait()}: no frames were carried "
                "any more; start the lab again"
            )
        return Usage(**json.loads(line))

    def stop(self) -> None:
        """End the process; its devices disappear."""
        self._process.kill()
        self._process.communicate()


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
