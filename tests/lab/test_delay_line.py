"""The delay line without devices: sockets that keep the bounds of messages stand for them."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from offbeat.lab.network import delay_line
from offbeat.lab.network.delay_line import Direction


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in two:
        end.setblocking(False)
    yield two
    for end in two:
        end.close()


def arrived(end: socket.socket) -> list[bytes]:
    """All frames that wait in a socket."""
    found = []
    while True:
        try:
            found.append(end.recv(2**16))
        except BlockingIOError:
            return found


def test_frames_wait_for_the_latency_and_keep_their_order_under_jitter(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    direction = Direction(ends[0].fileno(), 0.5, 0.4, 0.0, seed=0)
    start = time.monotonic()
    monkeypatch.setattr(delay_line.time, "monotonic", lambda: start + passed)
    for number in range(100):
        passed = number * 0.5
        direction.accept(bytes([number]))
    assert direction.deliver(start) >= start + 0.1 - delay_line.TRANSIT
    assert arrived(ends[1]) == []
    due = [due for due, _ in direction.queue]
    assert due == sorted(due)
    delays = [at - start - number * 0.5 for number, at in enumerate(due)]
    assert 0.1 - delay_line.TRANSIT <= min(delays) < 0.35 < 0.65 < max(delays) <= 0.9
    assert direction.deliver(due[49]) == pytest.approx(next(at for at in due if at > due[49]))
    early = arrived(ends[1])
    assert 50 <= len(early) < 100
    assert direction.deliver(due[-1]) == float("inf")
    assert early + arrived(ends[1]) == [bytes([number]) for number in range(100)]
    assert direction.held == 0


def test_a_seed_decides_which_frames_are_lost(ends: tuple[socket.socket, socket.socket]) -> None:
    found = []
    for seed in (1, 1, 2):
        direction = Direction(ends[0].fileno(), 0.0, 0.0, 0.1, seed)
        for number in range(200):
            direction.accept(bytes([number]))
        found.append(arrived(ends[1]))
        assert direction.frames == 200
    assert found[0] == found[1] != found[2]
    assert 0.8 < len(found[0]) / 200 < 0.97


def test_what_exceeds_the_limit_is_dropped(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay_line, "LIMIT", 250)
    direction = Direction(ends[0].fileno(), 1.0, 0.0, 0.0, seed=0)
    for _ in range(4):
        direction.accept(bytes(100))
    assert (direction.dropped, len(direction.queue)) == (2, 2)


def test_late_frames_are_counted(ends: tuple[socket.socket, socket.socket]) -> None:
    direction = Direction(ends[0].fileno(), 0.1, 0.0, 0.0, seed=0)
    direction.accept(b"x")
    direction.accept(b"y")
    first, second = (due for due, _ in direction.queue)
    direction.queue[1] = (second + 1, b"y")
    direction.deliver(first + 0.004)  # within 5 % of the latency
    assert direction.late == 0
    direction.deliver(second + 1.006)
    assert direction.late == 1


def test_a_device_that_is_down_loses_frames() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    direction = Direction(writing, 0.0, 0.0, 0.0, seed=0)
    direction.accept(b"x")
    os.close(writing)
    assert direction.frames == 1


@pytest.mark.processes
def test_the_process_reports_and_ends_with_its_input(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    other, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = json.dumps([[ends[0].fileno(), other.fileno(), 0.05, 0.0, 0.0]])
    line = subprocess.Popen(
        [sys.executable, "-I", "-S", delay_line.__file__, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[ends[0].fileno(), other.fileno()],
    )
    with other, far, line:
        start = time.monotonic()
        ends[1].send(b"frame")
        assert far.recv(100) == b"frame"
        assert time.monotonic() - start > 0.05 - delay_line.TRANSIT
        assert line.stdin is not None
        assert line.stdout is not None
        line.stdin.write(b"?")
        line.stdin.flush()
        counters = json.loads(line.stdout.readline())
        assert (counters["frames"], counters["dropped"]) == (1, 0)
        assert 0 < counters["cpu"] < counters["wall"] + 1
        line.stdin.close()
        assert line.wait(timeout=30) == 0
