"""The round trip to the farthest peer, as the kernel has measured it."""

import socket

from offbeat.platform.round_trip import FAR, round_trip


def test_a_peer_on_this_machine_is_near() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        here.sendall(b"some")
        there.recv(4)
        assert 0 < round_trip() < FAR
