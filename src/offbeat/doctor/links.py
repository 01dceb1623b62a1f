"""The links between all ranks that a launcher has started, measured by all of them at once.

In round d rank r measures the link to rank r + d: every rank sends to one and receives from one.
Up to 12 ranks that is every link in both directions; with more, d is a power of two.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from offbeat.doctor.addresses import own_address
from offbeat.doctor.finding import Finding, merge
from offbeat.doctor.probe import CONNECT, Link, Listener, Probe

if TYPE_CHECKING:
    from torch.distributed import Store

SECONDS = 0.5  # of sending along each link
ALL_PAIRS = 12  # ranks
PATIENCE = timedelta(seconds=60)  # for ranks that are late or have ended


def is_launched() -> bool:
    """Return whether a launcher such as torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ


def store_fault() -> Finding | None:
    """Return why the store that the launcher names cannot be reached, or None.

    Rank 0 may be its host, so that it listens a moment later.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + PATIENCE.total_seconds() / 2
    while os.environ["RANK"] != "0":
        try:
            socket.create_connection((host, port), CONNECT).close()
            break
        except OSError as error:
            if time.monotonic() >= end:
                text = f"rank {os.environ['RANK']} cannot connect to {host}:{port}: {error}"
                fix = f"allow TCP connections to port {port} of {host}, where the store listens"
                return Finding("store", "error", text, fix)
        time.sleep(0.1)
    return None


def examine(found: Sequence[Finding]) -> tuple[list[Finding], list[Link]] | None:
    """Measure all links, and return them with the findings of all ranks; None but on rank 0.

    All ranks call. Raises ``RuntimeError`` if ranks are missing.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from offbeat.platform.tcp_store import launched_store

    store = launched_store(PATIENCE)
    links = _measure_all(store, rank, size)
    own = {"findings": [*map(asdict, found)], "links": [*map(asdict, links)]}
    store.set(f"doctor/found/{rank}", json.dumps(own))
    if rank != 0:
        _meet(store, "end", size)  # rank 0 may be the host of the store
        return None
    everything = [json.loads(_get(store, f"doctor/found/{r}")) for r in range(size)]
    _meet(store, "end", size)
    findings = merge(
        [[Finding(**f | {"ranks": ()}) for f in each["findings"]] for each in everything]
    )
    return findings, [Link(**link) for each in everything for link in each["links"]]


def distances(size: int) -> list[int]:
    """Return the distances of the ranks that measure a link.

    >>> distances(4), distances(20)
    ([1, 2, 3], [1, 2, 4, 8, 16])
    """
    if size <= ALL_PAIRS:
        return list(range(1, size))
    return [2**power for power in range((size - 1).bit_length())]


def _measure_all(store: "Store", rank: int, size: int) -> list[Link]:
    listener = Listener(own_address())
    node = os.environ.get("GROUP_RANK") or socket.gethostname()
    store.set(f"doctor/address/{rank}", json.dumps([*listener.address, node]))
    found = []
    for distance in distances(size):
        target = (rank + distance) % size
        host, port, _ = json.loads(_get(store, f"doctor/address/{target}"))
        _meet(store, f"before{distance}", size)
        probe = Probe(rank, target, (host, port))
        _meet(store, f"after{distance}", size)
        found.append(probe.send(SECONDS))
    _meet(store, "measured", size)
    listener.close()
    return found


def _get(store: "Store", key: str) -> bytes:
    try:
        return store.get(key)
    except RuntimeError as error:
        raise RuntimeError(f"{key} is missing in the store: a rank has ended ({error})") from error


def _meet(store: "Store", name: str, size: int) -> None:
    """Wait until all ranks have come."""
    key, end = f"doctor/meet/{name}", time.monotonic() + PATIENCE.total_seconds()
    come = store.add(key, 1)
    while come < size:
        if time.monotonic() > end:
            raise RuntimeError(f"{size - come} of {size} ranks have not come; see their output")
        time.sleep(0.01)
        come = store.add(key, 0)
