"""The TCPStore of torch: to host one, and to connect to one within a limit."""

import contextlib
import os
import socket
import threading
import time
import warnings
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore

CONNECT = 60.0  # seconds for which a client tries: as long as a store may take to come back
SOON = 5.0  # seconds after which it says that it waits
PAUSE = 0.2  # seconds between two attempts
KEYS = timedelta(minutes=5)  # for which a get waits for its key


def host_store(port: int) -> TCPStore:
    """Host a TCPStore on ``port`` of all interfaces, 0 for a free one; `ValueError` if taken."""
    try:
        return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (DistNetworkError, TypeError) as error:  # the latter for what is no port
        is_port = isinstance(error, DistNetworkError)
        why = str(error).splitlines()[0] if is_port else "it is no port"
        raise ValueError(
            f"port {port}: no store can listen there ({why}); end what runs there, or pass another "
            "port, below 65536"
        ) from None


def connect_store(address: str) -> Store:
    """Connect to the TCPStore at ``"host:port"``; raises ``ValueError`` if none answers there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the store is at {address!r}, expected 'host:port'")
    host, until = host.strip("[]"), time.monotonic() + CONNECT
    why, tell = "it answers no client of torch", time.monotonic() + SOON
    while not (is_there := listens(host, int(port))) and (now := time.monotonic()) < until:
        if now > tell:
            tell = until
            text = f"no store at {address} yet; trying for {CONNECT:.0f} s"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        time.sleep(PAUSE)
    if not is_there:
        why = "nobody listens there"
    elif (found := _connected(host, int(port), until)) is not None:
        return found
    raise ValueError(
        f"no store at {address} within {CONNECT:.0f} s ({why}); start `offbeat store --port "
        f"{port}` on {host}, or correct the address"
    )


def launched_store(timeout: timedelta) -> Store:
    """Connect to the store that a launcher names in the environment, or be its host as rank 0."""
    has_host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0" and not has_host,
        wait_for_workers=False,
        timeout=timeout,
    )


def listens(host: str, port: int) -> bool:
    """Return whether somebody accepts connections there: a client of torch waits long for it."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def _connected(host: str, port: int, until: float) -> Store | None:
    # Torch's client waits for the first answer without a limit.
    found: list[Store] = []

    def connect() -> None:
        with contextlib.suppress(DistNetworkError):
            found.append(TCPStore(host, port, is_master=False, timeout=KEYS))

    thread = threading.Thread(target=connect, name="offbeat-connect", daemon=True)
    thread.start()
    thread.join(max(1.0, until - time.monotonic()))
    return found[0] if found else None
