"""Removal of the processes and namespaces that a lab has left, at its end or by the next lab.

The key of a lab holds the id of its process, the start time of that since ids are reused, and its
PID namespace, such as a container's: what has been left in another one is left alone. The names of
its network namespaces and the environment of its processes contain the key.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from offbeat.lab.network import network

_KEY = r"\d+-\d+-[0-9a-f]+-\d+"
MARK = "OFFBEAT_LAB"  # environment variable that holds the key, in every process of a lab


def key(serial: int) -> str:
    """Return a key for a lab of this process; ``serial`` distinguishes its labs."""
    return f"{os.getpid()}-{_start_of(os.getpid())}-{serial:x}-{_namespace()}"


def namespaces_prefix(lab: str) -> str:
    """Return the common prefix of the names of a lab's namespaces."""
    return f"offbeat-{lab}"


def end_processes(lab: str) -> None:
    """Kill the processes that have left the process groups of their ranks."""
    _kill_all(pid for pid, owner in _marked_processes() if owner == lab)


def remove() -> None:
    """Kill the processes and delete the namespaces of labs that have ended."""
    _kill_all(pid for pid, owner in _marked_processes() if not _is_alive(owner))
    if os.geteuid() == 0:
        network.remove([name for name, owner in _namespaces() if not _is_alive(owner)])


def _namespaces() -> Iterator[tuple[str, str]]:
    if network.FOLDER.is_dir():
        for path in network.FOLDER.iterdir():
            if match := re.match(f"offbeat-({_KEY})-", path.name):
                yield path.name, match[1]


def _marked_processes() -> Iterator[tuple[int, str]]:
    # The kernel kills a rank with its lab, but not the processes that the rank has started, such
    # as the workers of a data loader. They have the key too, since they inherit the environment.
    mark = re.compile(f"(?:^|\0){MARK}=({_KEY})".encode())
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            match = mark.search(path.read_bytes())
        except OSError:  # it has just ended, or belongs to another user
            continue
        pid = int(path.parent.name)
        if match and pid != os.getpid():  # this process may be a rank of another lab
            yield pid, match[1].decode()


def _kill_all(processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _is_alive(owner: str) -> bool:
    pid, start, _, namespace = owner.split("-")
    # An id of another namespace cannot be looked up here.
    return int(namespace) != _namespace() or _start_of(int(pid)) == int(start)


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:  # a kernel without them
        return 0


def _start_of(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses, which may contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()  # from the third on: state, ..., start time (22nd)
    return None if fields[0] in "ZX" else int(fields[19])
