"""A run of three workers under a framework: the first is killed, and a fourth process joins.

All are forked from one process, which imports the framework once, and meet in `offbeat store`.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

WORKERS, STEPS_AFTER, EPOCH = 3, 15, 8
KILLED_AFTER = 2.5  # seconds: the store has seen it train
Work = Callable[[Path, int], dict[str, Any]]


def run(host: str, folder: Path) -> None:
    """Run ``work(folder, number)`` of ``<host>_elastic_cases`` in each; keep what they return."""
    os.setsid()  # whoever has started this can end all
    work: Work = import_module(f"{host}_elastic_cases").work
    port = _free_port()
    store = subprocess.Popen(
        [sys.executable, "-m", "offbeat", "store", f"--port={port}", f"--workers={WORKERS}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert store.stderr is not None
    store.stderr.readline()  # it listens: a client that is too early may connect to itself
    os.environ["OFFBEAT_STORE"] = f"127.0.0.1:{port}"
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_report, args=(work, folder, i)) for i in range(WORKERS + 1)]
    try:
        for process in processes:
            process.start()
        _wait(lambda: _first(folder) is not None)
        os.kill(int(_first(folder) or 0), signal.SIGKILL)
        (folder / "go").touch()
        for process in processes:
            process.join(80)
    finally:
        for process in processes:
            process.kill()
        store.kill()
        store.wait()


def found_in(folder: Path) -> list[dict[str, Any]]:
    """What the survivors and the newcomer have returned."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("result*.json"))]


def tell(folder: Path, replica: Any) -> None:
    """Let the first rank be killed while the others wait for it; call it after each step.

    At the end of an epoch: they find out in what follows it, such as a validation.
    """
    since = _begun.setdefault(os.getpid(), time.monotonic())
    is_first = replica.world.rank == 0 and not replica.lost
    if is_first and time.monotonic() - since > KILLED_AFTER and replica.steps % EPOCH == 0:
        (folder / "first.tmp").write_text(str(os.getpid()))
        (folder / "first.tmp").rename(folder / "first")
        time.sleep(60)
    time.sleep(0.02)


_begun: dict[int, float] = {}  # by process


def is_over(replica: Any) -> bool:
    """Whether all have trained together with the one that has joined; alike on all ranks."""
    return any(replica.steps >= join["step"] + STEPS_AFTER for join in replica.joined)


def _report(work: Work, folder: Path, number: int) -> None:
    if number == WORKERS:
        _wait((folder / "go").exists)
    found = work(folder, number)
    (folder / f"result{number}.json").write_text(json.dumps(found))


def _first(folder: Path) -> str | None:
    path = folder / "first"
    return path.read_text() if path.exists() else None


def _wait(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError("the run has not come so far in 60 s")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
