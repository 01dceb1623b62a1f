"""Encrypted links in a real network: needs root, iproute2, tbf and WireGuard."""

import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lab_scripts
from offbeat.cli import app
from offbeat.lab import Lab, Unavailable
from offbeat.lab.network.network import inside
from offbeat.transport.run.token import VARIABLE

TOKEN = "1f" * 16
PARAMETERS = struct.pack("<f", 1.2345) * 8
ALL_FRAMES = 3  # ETH_P_ALL
# As in docs/internet.md; frames that tell the addresses of the link are not IP.
FIREWALL = """
table inet node {
    chain input {
        type filter hook input priority 0; policy drop;
        iifname { "lo", "wg0" } accept
        udp dport 51820 accept
    }
}
"""


@functools.cache
def obstacle() -> str:
    """Why links cannot be encrypted here; empty if they can."""
    try:
        with Lab(1, rate="1gbit", encrypt=True):
            return ""
    except Unavailable as error:
        return str(error)


pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
]


@pytest.fixture(autouse=True)
def _can_run() -> None:
    if reason := obstacle():
        pytest.skip(reason)


@contextmanager
def captured(namespace: str, device: str) -> Iterator[list[bytes]]:
    """Collect all frames of a device."""

    def opened() -> socket.socket:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_FRAMES))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
        wire.bind((device, 0))
        wire.settimeout(0.1)
        return wire

    frames: list[bytes] = []
    has_ended = threading.Event()

    def collect() -> None:
        while not has_ended.is_set():
            try:
                frames.append(wire.recv(2**17))
            except TimeoutError:
                continue

    with inside(namespace, opened) as wire:
        thread = threading.Thread(target=collect)
        thread.start()
        try:
            yield frames
        finally:
            has_ended.set()
            thread.join()


def trained(encrypt: bool) -> tuple[list[str], bytes]:
    """Train on two nodes behind a firewall; return what rank 0 prints, and what is on its link."""
    printed: list[str] = []
    with Lab(2, encrypt=encrypt) as lab:
        network = lab._network
        for node in range(2 if encrypt else 0):
            command = ["ip", "netns", "exec", network.namespace(node), "nft", "-f", "-"]
            subprocess.run(command, input=FIREWALL, text=True, check=True)
        with captured(network.hub, "node0") as frames:
            command = [sys.executable, "-c", lab_scripts.ENCRYPTED]
            code = lab.run(
                command,
                env={VARIABLE: TOKEN},
                on_line=lambda rank, line: printed.append(line) if rank == 0 else None,
            )
    assert code == 0, printed
    return printed, b"".join(frames)


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables for the firewall")
@pytest.mark.fault(
    "somebody listens or connects between two nodes of a WireGuard network",
    "neither parameters nor the token are seen",
)
def test_a_capture_finds_neither_parameters_nor_the_token() -> None:
    plain, seen = trained(encrypt=False)
    assert plain == ["outside: True", "trained"]
    assert PARAMETERS in seen
    assert TOKEN.encode() not in seen  # it is never sent
    hidden, seen = trained(encrypt=True)
    assert hidden == ["outside: False", "trained"]
    assert len(seen) > 400_000
    assert PARAMETERS not in seen
    assert TOKEN.encode() not in seen


def test_the_tunnels_end_with_the_lab() -> None:
    def running() -> set[str]:
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if path.read_bytes().startswith(b"wireguard-go"):
                    found.add(path.parent.name)
            except OSError:
                continue
        return found

    before = running()
    with Lab(3, rate="100mbit", latency="5ms", encrypt=True) as lab:
        ask = ["sh", "-c", "ping -c 1 -W 5 node$(( (RANK + 1) % 3 )) || exit 3"]
        assert not shutil.which("ping") or lab.run(ask) == 0
    assert running() == before
    assert not list(Path("/run/netns").glob(f"offbeat-{os.getpid()}-*"))


@pytest.mark.fault("`offbeat lab --encrypt` without WireGuard", "exit code 2; names the packages")
def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.lab.network.tunnels._PATH", "/nowhere")
    result = CliRunner().invoke(app, ["lab", "--nodes", "2", "--encrypt", "--", "true"])
    assert result.exit_code == 2
    assert "apt-get install wireguard-tools" in result.stderr.replace("\n", " ")
