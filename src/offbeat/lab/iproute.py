"""iproute2, the commands that make networks: many lines at once, and errors that teach."""

import os
import shutil
import subprocess
from collections.abc import Sequence


class Unavailable(ValueError):
    """This machine or this user cannot emulate a network; says what to do about it."""


def require() -> None:
    """Raise :class:`Unavailable` if networks cannot be emulated here at all."""
    for tool in ("ip", "tc"):
        _path(tool)
    if os.geteuid() != 0:
        raise Unavailable(
            f"the lab makes network namespaces, which needs root, and this is user {os.geteuid()}; "
            'start it as root, for example with: sudo env "PATH=$PATH" offbeat lab ...'
        )


def batch(tool: str, lines: Sequence[str], namespace: str = "", force: bool = False) -> None:
    """One process for many commands, in a namespace if named."""
    where = ["-netns", namespace] if namespace else []
    done = subprocess.run(
        [_path(tool), *where, *(["-force"] if force else []), "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        process_group=0,  # a Ctrl-C is for the lab alone: it must be able to clean up after it
    )
    if done.returncode != 0:
        raise Unavailable(_explain(tool, done.stderr.strip()))


def _path(tool: str) -> str:
    # Root's PATH does not have the sbin folders everywhere (plain su).
    path = shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise Unavailable(
            f"the lab needs the command {tool!r}, which is not installed; install iproute2, for "
            "example with: apt-get install iproute2"
        )
    return path


def _explain(tool: str, said: str) -> str:
    first = said.splitlines()[0] if said else "nothing"
    if "qdisc kind is unknown" in said:
        return (
            "limiting the rate needs the kernel's token bucket filter (tbf), which is not there "
            f"({tool}: {first}); load it with: modprobe sch_tbf, or leave --rate away"
        )
    if "device type" in said:
        return (
            f"the lab needs the kernel's veth and bridge devices ({tool}: {first}); load them "
            "with: modprobe -a veth bridge"
        )
    if "not permitted" in said or "denied" in said.lower():
        return (
            f"this root may not make network namespaces ({tool}: {first}); in a container, start "
            "the container with --privileged"
        )
    return f"the network could not be made ({tool}: {first}); see whether that command works alone"
