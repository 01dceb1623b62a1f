"""The script that measures packets between nodes, run on every rank by a bare interpreter.

It must not import anything of offbeat. Its argument is a JSON list of flows, each a dictionary:
``kind``, the ranks ``sender`` and ``receiver``, the receiver's host ``to``, and ``seconds``,
``packets`` per second, ``bytes`` of each one on the wire, seconds to ``wait`` for the last ones and
the ``run``: packets of the run before may still be on their way, and are none of this one.
A flow sends UDP packets as fast as its link accepts them (``rate``), at a steady pace (``loss``),
or such that come back (``echo``). One side of each prints its result as one line of JSON, with
the flow's number.
"""

import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Flow = dict[str, Any]
PORT = 9000
HEADERS = 14 + 20 + 8  # of Ethernet, IP and UDP
SETTLE = 0.3  # seconds until the buckets' burst has passed, and the rate is that of the link
PATIENCE = 20.0  # seconds without a packet after which a side gives up
RECEIVE_BUFFER = 2**23


def word(text: str, flow: Flow) -> bytes:
    """Return ``text`` as a packet of this run."""
    return f"{text} {flow['run']}".encode()


def connect(flow: Flow, port: int) -> socket.socket:
    """Return a socket whose receiver has answered."""
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # Smaller than the queues of the link: the sender waits, instead of packets being dropped.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    link.connect((flow["to"], port))
    link.settimeout(0.05)
    answered, until, hello = False, time.monotonic() + PATIENCE, word("hello", flow)
    while not answered:
        if time.monotonic() > until:
            raise TimeoutError(f"{flow['to']} has not answered for {PATIENCE:.0f} s")
        with contextlib.suppress(TimeoutError, ConnectionRefusedError):
            link.send(hello)
            answered = link.recv(100) == hello
    link.settimeout(None)
    return link


def finish(link: socket.socket, flow: Flow) -> None:
    """Tell the receiver that this was all, often enough for links with loss."""
    for _ in range(20):
        with contextlib.suppress(ConnectionRefusedError):  # it has ended
            link.send(word("end", flow))
        time.sleep(0.01)


def send_rate(flow: Flow, port: int) -> None:
    """Send packets as fast as the link accepts them."""
    with connect(flow, port) as link:
        packet = bytes(flow["bytes"] - HEADERS)
        end = time.monotonic() + flow["seconds"]
        while time.monotonic() < end:
            link.send(packet)
        finish(link, flow)


def send_paced(flow: Flow, port: int) -> int:
    """Send packets at a steady pace, in batches of one millisecond; return their number."""
    with connect(flow, port) as link:
        total: int = round(flow["seconds"] * flow["packets"])
        sent = 0
        packet, start = bytes(flow["bytes"] - HEADERS), time.monotonic()
        while sent < total:
            due = min(total, 1 + int((time.monotonic() - start) * flow["packets"]))
            for _ in range(due - sent):
                link.send(packet)
            sent = due
            time.sleep(1e-3)
        finish(link, flow)
    return total


def send_echo(flow: Flow, port: int) -> float:
    """Send packets that come back; return the median round trip in seconds."""
    with connect(flow, port) as link:
        trips: list[float] = []

        def collect() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stamp = link.recv(100)
                    if stamp[:1].isdigit():
                        trips.append(time.perf_counter() - float(stamp))

        thread = threading.Thread(target=collect)
        link.settimeout(flow["wait"])
        thread.start()
        for _ in range(round(flow["seconds"] * flow["packets"])):
            link.send(repr(time.perf_counter()).encode())
            time.sleep(1 / flow["packets"])
        thread.join()
        finish(link, flow)
    return statistics.median(trips)


def receive(flow: Flow, link: socket.socket) -> list[float]:
    """Answer packets until the end; return when those arrived that need no answer."""
    buffer, arrived, has_begun = bytearray(2**11), list[float](), False
    hello, end = word("hello", flow), word("end", flow)
    while True:
        size, sender = link.recvfrom_into(buffer)
        packet = buffer[: min(size, 32)]
        if packet == end:
            return arrived
        has_begun |= packet == hello
        if packet == hello or (has_begun and flow["kind"] == "echo"):
            link.sendto(packet, sender)
        elif has_begun:
            arrived.append(time.monotonic())


def settled_rate(arrived: list[float], size: int) -> float:
    """Return the median Mbit/s of ten groups of packets: a busy machine may pause some of them."""
    settled = [at for at in arrived if at - arrived[0] > SETTLE]
    group = max(1, (len(settled) - 1) // 10)
    ends = settled[::group]
    times = [end - start for start, end in itertools.pairwise(ends)]
    return group * size * 8e-6 / statistics.median(times) if times else 0.0


def serve(index: int, flow: Flow, link: socket.socket) -> None:
    """Receive one flow."""
    with link:
        arrived = receive(flow, link)
    if flow["kind"] != "echo":
        say(index, received=len(arrived), mbit=settled_rate(arrived, flow["bytes"]))


def send(index: int, flow: Flow) -> None:
    """Send one flow."""
    if flow["kind"] == "rate":
        send_rate(flow, PORT + index)
    elif flow["kind"] == "loss":
        say(index, sent=send_paced(flow, PORT + index))
    else:
        say(index, round_trip=send_echo(flow, PORT + index))


def say(index: int, **result: float) -> None:
    """Print a result, in one write: other threads print too."""
    sys.stdout.write(json.dumps({"flow": index, **result}) + "\n")
    sys.stdout.flush()


def listen(index: int, wait: float) -> socket.socket:
    """Return the socket that receives a flow."""
    link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):  # beyond the usual limit, as root
        link.setsockopt(socket.SOL_SOCKET, 33, RECEIVE_BUFFER)  # SO_RCVBUFFORCE
    link.bind(("", PORT + index))
    link.settimeout(PATIENCE + wait)
    return link


def end_process(error: threading.ExceptHookArgs) -> None:
    """Let an error in one flow be that of the process."""
    threading.__excepthook__(error)
    os._exit(1)


def main(rank: int, flows: list[Flow]) -> None:
    """Take part in the flows of a rank, all at once."""
    work: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    for index, flow in enumerate(flows):
        if flow["receiver"] == rank:
            work.append((serve, (index, flow, listen(index, flow["wait"]))))
        if flow["sender"] == rank:
            work.append((send, (index, flow)))
    threading.excepthook = end_process
    threads = [threading.Thread(target=target, args=arguments) for target, arguments in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), json.loads(sys.argv[1]))
