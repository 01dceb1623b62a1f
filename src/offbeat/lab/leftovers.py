"""What may be left of a lab: found by name and by mark, removed at its end or by the next lab.

A lab's key names its process, and the start of that, since process numbers come again. Its
namespaces carry the key in their names, its processes in their environment.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from offbeat.lab import network

MARK = "OFFBEAT_LAB"  # in the environment of every process that a lab has started


def key(serial: int) -> str:
    """A key for one of this process's labs."""
    return f"{os.getpid()}-{_start_of(os.getpid())}-{serial:x}"


def namespaces_prefix(lab: str) -> str:
    """How the names of a lab's namespaces begin."""
    return f"offbeat-{lab}"


def end_processes(lab: str) -> None:
    """Kill what has escaped from the ranks' process groups."""
    _kill(pid for pid, owner in _marked_processes() if owner == lab)


def remove() -> None:
    """End the processes and delete the namespaces of labs that live no more."""
    _kill(pid for pid, owner in _marked_processes() if not _lives(owner))
    if os.geteuid() == 0:
        network.remove([name for name, owner in _namespaces() if not _lives(owner)])


def _namespaces() -> Iterator[tuple[str, str]]:
    if network.FOLDER.is_dir():
        for path in network.FOLDER.iterdir():
            if match := re.match(r"offbeat-(\d+-\d+-[0-9a-f]+)-", path.name):
                yield path.name, match[1]


def _marked_processes() -> Iterator[tuple[int, str]]:
    # A rank dies with its lab, but not what the rank has started: a shell's command, a loader's
    # workers. They carry the mark, as children inherit their environment.
    mark = re.compile(rb"(?:^|\0)" + MARK.encode() + rb"=(\d+-\d+-[0-9a-f]+)")
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            match = mark.search(path.read_bytes())
        except OSError:  # it has just ended, or belongs to somebody else
            continue
        pid = int(path.parent.name)
        if match and pid != os.getpid():  # we may ourselves be a rank of another lab
            yield pid, match[1].decode()


def _kill(processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _lives(owner: str) -> bool:
    pid, start, _ = owner.split("-")
    return _start_of(int(pid)) == int(start)


def _start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses, which may hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()  # from the third on: the state, ..., 22 the start
    return None if fields[0] in "ZX" else int(fields[19])
