"""The links between all ranks that a launcher has started, measured by all of them at once.

In round d rank r measures the link to rank r + d: every rank sends to one and receives from one.
Up to 12 ranks that is every link in both directions; with more, d is a power of two.
"""

import json
import os
import re
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
    return os.environ.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" in os.environ


def launcher_fault() -> Finding | None:
    """Return what is wrong with the variables of a launcher, or None."""
    allowed = {"WORLD_SIZE": (1, 2**31 - 1), "RANK": (0, 2**31 - 1), "MASTER_PORT": (1, 65535)}
    wrong = []
    for name, (low, high) in allowed.items():
        text = os.environ.get(name)
        if not re.fullmatch("[0-9]{1,10}", text or "") or not low <= int(text or "") <= high:
            wrong.append(f"{name}={text!r} (a whole number from {low} to {high})")
    if not wrong:
        return None
    fix = (
        "start all ranks by torchrun, which sets WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT, or "
        "set all four; without WORLD_SIZE this machine alone is checked"
    )
    return Finding("launcher", "error", ", ".join(wrong), fix)


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
    """Measure all links, and return them with the findings of all ranks.

    All ranks call; rank 0 returns them, the others None. If ranks do not come, the first of those
    that do returns what these have found, and a finding that names the others, without links.
    Raises ``RuntimeError`` if ranks end meanwhile.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from offbeat.platform.tcp_store import launched_store

    store = launched_store(PATIENCE)
    store.set(f"doctor/findings/{rank}", json.dumps([*map(asdict, found)]))
    if missing := _missing(store, size):
        is_first = {*range(rank)}.issubset(missing)
        return (_findings(store, missing, size), []) if is_first else None
    links = _measure_all(store, rank, size)
    store.set(f"doctor/links/{rank}", json.dumps([*map(asdict, links)]))
    if rank != 0:
        store.add("doctor/meet/end", 1)  # rank 0, which may be the host of the store, ends last
        return None
    measured = [json.loads(_get(store, f"doctor/links/{r}")) for r in range(size)]
    findings = _findings(store, [], size)
    _meet(store, "end", size)
    return findings, [Link(**link) for links in measured for link in links]


def distances(size: int) -> list[int]:
    """Return the distances of the ranks that measure a link.

    >>> distances(4), distances(20)
    ([1, 2, 3], [1, 2, 4, 8, 16])
    """
    if size <= ALL_PAIRS:
        return list(range(1, size))
    return [2**power for power in range((size - 1).bit_length())]


def _missing(store: "Store", size: int) -> list[int]:
    """Return the ranks that have not come in time."""
    keys, end = [f"doctor/findings/{r}" for r in range(size)], time.monotonic() + PATIENCE.seconds
    try:
        while not store.check(keys):  # at once: each rank asks for all
            if time.monotonic() > end:
                return [r for r in range(size) if not store.check([keys[r]])]
            time.sleep(0.05)
    except RuntimeError:
        raise RuntimeError("rank 0, the host of the store, has ended; see its output") from None
    return []


def _findings(store: "Store", missing: Sequence[int], size: int) -> list[Finding]:
    """Return the findings of the ranks that have come, and one on those that have not."""
    found: list[list[Finding]] = [[] for _ in range(size)]
    for rank in {*range(size)}.difference(missing):
        said = json.loads(_get(store, f"doctor/findings/{rank}"))
        found[rank] = [Finding(**each | {"ranks": ()}) for each in said]
    if not missing:
        return merge(found)
    text = f"ranks {[*missing]} of {size} did not reach the store within {PATIENCE.seconds} s"
    fix = "read their output, and that of the launcher on their nodes"
    return [*merge(found), Finding("ranks", "error", text, fix)]


def _measure_all(store: "Store", rank: int, size: int) -> list[Link]:
    listener = None
    try:
        listener = Listener(own_address())
        where = *listener.address, ""
    except OSError as error:  # a finding says so, and how to mend it
        where = "", 0, f"an address: it has none ({error})"
    store.set(f"doctor/address/{rank}", json.dumps(where))
    found = []
    for distance in distances(size):
        target = (rank + distance) % size
        host, port, fault = json.loads(_get(store, f"doctor/address/{target}"))
        _meet(store, f"before{distance}", size)
        probe = None if fault else Probe(rank, target, (host, port))
        _meet(store, f"after{distance}", size)
        found.append(Link(rank, target, fault) if probe is None else probe.send(SECONDS))
    _meet(store, "measured", size)
    if listener is not None:
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
