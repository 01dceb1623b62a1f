"""The start of a rank: tie its lifetime to the lab's, enter the node, execute the command.

This file is run by a bare interpreter, not as a module of the package: importing the package
would import torch in every rank, 1.3 s instead of 0.01 s. It must not import anything of offbeat.
"""

import ctypes
import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x80000, 2
_PR_SET_PDEATHSIG = 1
_HOSTS = Path("/etc/hosts")
_SCRATCH = Path("/run")  # exists: iproute2 keeps its namespaces there


def command_in(namespace: str, hosts: str, command: Sequence[str]) -> list[str]:
    """Return the arguments of a process that executes ``command`` by :func:`main`."""
    bare = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return [*bare, namespace, hosts, *command]


def join_network(namespace: int) -> None:
    """Move the calling thread, and what it starts later, into an open network namespace."""
    # os.setns exists only from Python 3.12 on.
    _check(_libc().setns(namespace, _CLONE_NEWNET), "enter the network namespace")


def name_hosts(lines: str) -> None:
    """Prepend ``lines`` to /etc/hosts, only for the calling thread and what it starts.

    torch looks up the host name of every peer. If the lookup fails, it warns on every rank; where
    lookups leave the namespace through a local service, it waits for the machine's network.
    """
    if not _HOSTS.exists():
        return
    text = lines + _HOSTS.read_text(encoding="utf-8", errors="replace")
    _check(_libc().unshare(_CLONE_NEWNS), "make a mount namespace")
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)
    # In memory; it disappears with the last process in the mount namespace.
    _mount("offbeat", _SCRATCH, "tmpfs", 0)
    (_SCRATCH / "hosts").write_text(text, encoding="utf-8")
    _mount(_SCRATCH / "hosts", _HOSTS, None, _MS_BIND)
    _check(_libc().umount2(os.fsencode(_SCRATCH), _MNT_DETACH), "unmount")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(source: str | Path, target: str | Path, kind: str | None, flags: int) -> None:
    encoded = (os.fsencode(source), os.fsencode(target), kind and kind.encode())
    _check(_libc().mount(*encoded, ctypes.c_ulong(flags), None), f"mount on {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")


def main(lab: int, namespace: str, hosts: str, command: list[str]) -> None:
    """Execute ``command`` as a child of process ``lab``, in a network namespace ("" for none)."""
    # The kernel kills this process when the lab ends, even by SIGKILL. The lab may have ended
    # before this line: then the parent is another process.
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "tie this process to the lab")
    if os.getppid() != lab:
        sys.exit(1)
    if namespace:
        join_network(os.open(namespace, os.O_RDONLY | os.O_CLOEXEC))
        name_hosts(hosts)
    # Python ignores these two signals from its start, and the command would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
