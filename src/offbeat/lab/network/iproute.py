"""Calls of iproute2 (``ip`` and ``tc``), with error messages that name the remedy."""

import os
import shutil
import subprocess
from collections.abc import Sequence


class Unavailable(ValueError):
    """Raised if this machine or user cannot emulate a network; the message names the remedy."""


def require() -> None:
    """Raise :class:`Unavailable` unless iproute2 is installed and the user is root."""
    for tool in ("ip", "tc"):
        _path(tool)
    if os.geteuid() != 0:
        raise Unavailable(
            f"the lab creates network namespaces, which needs root, and this is user "
            f'{os.geteuid()}; run it as root, for example: sudo env "PATH=$PATH" offbeat lab ...'
        )


def batch(tool: str, lines: Sequence[str], namespace: str = "", force: bool = False) -> None:
    """Run a batch of commands in one process, in ``namespace`` if given.

    Raises :class:`Unavailable` if a command fails; with ``force`` the others run all the same.
    """
    where = ["-netns", namespace] if namespace else []
    done = subprocess.run(
        [_path(tool), *where, *(["-force"] if force else []), "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        process_group=0,  # Ctrl-C must reach only the lab, which cleans up after it
    )
    if done.returncode != 0:
        raise Unavailable(_explain(tool, done.stderr.strip()))


def _path(tool: str) -> str:
    # The PATH of root lacks the sbin folders on some systems (after plain su).
    path = shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise Unavailable(
            f"the lab needs the command {tool!r}, which is not installed; install iproute2, for "
            "example: apt-get install iproute2"
        )
    return path


def _explain(tool: str, stderr: str) -> str:
    first = stderr.splitlines()[0] if stderr else "no message"
    if "qdisc kind is unknown" in stderr:
        return (
            "limiting the rate needs the token bucket filter (tbf) of the kernel, which is missing "
            f"({tool}: {first}); load it with: modprobe sch_tbf, or omit --rate"
        )
    if "device type" in stderr:
        return (
            f"the lab needs the veth and bridge devices of the kernel ({tool}: {first}); load "
            "them with: modprobe -a veth bridge"
        )
    if "not permitted" in stderr or "denied" in stderr.lower():
        return (
            f"root has no permission to create network namespaces here ({tool}: {first}); start "
            "the container with --privileged"
        )
    return f"creating the network failed ({tool}: {first}); check the installation of iproute2"
