"""Encrypted links between nodes: a WireGuard interface on each, set up as docs/internet.md says.

By the kernel's module where it has that, else by a process of ``wireguard-go`` for each node.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple, final

from offbeat.lab import enter
from offbeat.lab.network.iproute import Unavailable
from offbeat.lab.network.wire import Wire

INTERFACE = "wg0"  # every node's, in its own namespace
PORT = 51820  # the one UDP port of a node
# Of packets inside: 1,500 bytes of Ethernet hold one with the headers of IPv6, UDP and WireGuard.
MTU = 1420
# Of the rate of a link, for packets inside: each grows by 60 bytes. Nothing tells TCP how much of
# what it has sent waits outside, so the queue there would overflow: at 25 Mbit/s, messages in both
# directions took twice as long. It does know of a queue inside.
SHARE = 0.93
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# In a mount namespace of its own, in which wireguard-go keeps its socket: equal names do not
# collide, and nothing remains. With the shell, wireguard-go inherits that it ends with the lab.
_START = f"""
exec 3<&0
configure() {{
    wg setconf {INTERFACE} /dev/fd/3 && ip address add "$1/24" dev {INTERFACE} &&
    ip link set {INTERFACE} mtu {MTU} up && {{ [ -z "$2" ] || ip route replace $2; }} && echo ready
}}
if ip link add {INTERFACE} type wireguard 2>/dev/null; then configure "$@"; exit; fi
mkdir -p /var/run/wireguard && mount -t tmpfs offbeat /var/run/wireguard || exit 1
{{
    for i in $(seq 500); do
        [ -S /var/run/wireguard/{INTERFACE}.sock ] && break
        sleep 0.01
    done
    configure "$@"
    exec >&- 2>&-
}} &
exec wireguard-go -f {INTERFACE}
"""


def wire_inside(link: Wire) -> Wire:
    """Return the limit of what a node sends through tunnels over ``link``."""
    return Wire(None if link.rate is None else round(SHARE * link.rate))


class Place(NamedTuple):
    """Where a tunnel ends."""

    namespace: Path  # of the network
    outside: IPv4Address  # on the link
    inside: IPv4Address  # in the encrypted network
    route: str = ""  # the arguments of "ip route replace" there


@final
class Tunnels:
    """The encrypted network of ``places``, each of which reaches every other one."""

    def __init__(self, places: Sequence[Place]) -> None:
        """Make keys and connect; raises :class:`Unavailable` where WireGuard is missing."""
        if shutil.which("wg", path=_PATH) is None:
            raise Unavailable(_missing("the command 'wg' is not installed"))
        private = [_wg("genkey") for _ in places]
        public = [_wg("pubkey", key) for key in private]
        self._processes: list[subprocess.Popen[str]] = []
        try:
            for place, key in zip(places, private, strict=True):
                peers = [(p, k) for p, k in zip(places, public, strict=True) if p is not place]
                self._start(place, _configuration(key, peers))
            for process in self._processes:
                _require_ready(process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the processes; interfaces of the kernel end with their namespaces."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _start(self, place: Place, configuration: str) -> None:
        start = ["sh", "-c", _START, "sh", str(place.inside), place.route]
        process = subprocess.Popen(
            enter.command_in(str(place.namespace), "", start),
            env={"PATH": _PATH, "LOG_LEVEL": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the lab
        )
        self._processes.append(process)
        with contextlib.suppress(OSError):  # before other processes, as the kernel's module would
            os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))
        assert process.stdin is not None, "a pipe"
        process.stdin.write(configuration)
        process.stdin.close()
        process.stdin = None


def _configuration(private: str, peers: Sequence[tuple[Place, str]]) -> str:
    lines = ["[Interface]", f"PrivateKey = {private}", f"ListenPort = {PORT}"]
    for place, public in peers:
        lines += ["[Peer]", f"PublicKey = {public}", f"AllowedIPs = {place.inside}/32"]
        lines += [f"Endpoint = {place.outside}:{PORT}"]
    return "\n".join(lines) + "\n"


def _require_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None, "a pipe"
    said = []
    for line in process.stdout:
        if line == "ready\n":
            return
        said.append(line.strip())
    raise Unavailable(_missing("; ".join(said) or "wireguard-go has ended"))


def _missing(why: str) -> str:
    return (
        f"encrypting links needs WireGuard ({why}); install the tools, for example: apt-get "
        "install wireguard-tools, and where the kernel lacks the module: apt-get install "
        "wireguard-go"
    )


def _wg(command: str, given: str = "") -> str:
    done = subprocess.run(
        ["wg", command],
        input=given,
        env={"PATH": _PATH},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
