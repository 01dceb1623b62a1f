"""The processes of a run: started together, watched together, ended together."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self, final

from offbeat.lab import enter, leftovers
from offbeat.lab.output import Output

POLL = 0.02  # seconds between two looks at all ranks
GRACE = 5.0  # seconds from SIGTERM to SIGKILL


class Entry(NamedTuple):
    """Into which node a rank goes; nothing to do on loopback."""

    namespace: str = ""  # path of the network namespace
    hosts: str = ""  # lines of /etc/hosts


def require(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise ValueError if ``command`` is empty or cannot be started."""
    if not command:
        raise ValueError(
            "no command: nothing is left to run after the options; add one, for example: "
            "offbeat lab --nodes 2 -- python train.py"
        )
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ValueError(
            f"the command {command[0]!r} was not found on PATH, or may not be executed; name a "
            "program, for a script for example: python train.py"
        )


@final
@dataclass(eq=False)
class Rank:
    """One rank's process, which leads a process group of its own."""

    number: int
    node: int
    process: subprocess.Popen[bytes]
    killed: bool = False  # on purpose
    code: int | None = None  # as a shell would give it, once it has ended

    def look(self) -> bool:
        """Whether it has ended since the last look."""
        if self.code is not None:
            return False
        # Left a zombie until the end of the run: its number cannot be given to another process,
        # so that a signal to its group can never hit a stranger.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, self.process.pid, flags)
        if status is not None:
            exited = status.si_code == os.CLD_EXITED
            self.code = status.si_status + (0 if exited else 128)
        return status is not None

    def signal(self, number: int) -> None:
        """Send a signal to the rank and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


@final
@dataclass
class Crew:
    """All ranks of one run; leaving the context ends what still runs, and all that they started.

    ``key`` is what marks processes of this lab, see :mod:`~offbeat.lab.leftovers`.
    """

    output: Output
    key: str
    ranks: list[Rank] = field(default_factory=list)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], node: int, entry: Entry
    ) -> None:
        """Start the next rank.

        The calling thread must outlive the run: the ranks die with it.
        """
        number = len(self.ranks)
        bare = [sys.executable, "-I", "-S", enter.__file__]
        become = [*bare, str(os.getpid()), entry.namespace, entry.hosts, *command]
        with self.output.sink(number) as sink:
            process = subprocess.Popen(
                become,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the lab alone, which ends the ranks
            )
        self.ranks.append(Rank(number, node, process))

    def supervise(self, keep_going: bool) -> int:
        """Wait for all ranks, or for the first that fails; its exit code, or 0."""
        failed = 0
        while any(rank.code is None for rank in self.ranks):
            self.output.raise_error()
            for rank in self.ranks:
                if not rank.look() or rank.code == 0 or rank.killed:
                    continue
                failed = failed or rank.code or 0
                ending = "" if keep_going else "; ending the others (--keep-going lets them go on)"
                self.output.tell(f"rank {rank.number} failed: {_reason(rank.code or 0)}{ending}")
                if not keep_going:
                    return failed
            time.sleep(POLL)
        return failed

    def kill(self, number: int) -> None:
        """Kill a rank on purpose."""
        rank = self.ranks[number]
        if rank.code is not None:
            self.output.tell(f"rank {number} was to be killed, but has ended before")
            return
        rank.killed = True
        rank.signal(signal.SIGKILL)
        self.output.tell(f"rank {number} killed")

    def signal_node(self, node: int, number: int) -> None:
        """Send a signal to all ranks of a node."""
        for rank in self.ranks:
            if rank.node == node:
                rank.signal(number)

    def end(self) -> None:
        """Ask what still runs to end, kill what does not, and everything that ranks left behind."""
        try:
            deadline = time.monotonic() + GRACE
            for rank in self.ranks:
                if rank.code is None:
                    rank.signal(signal.SIGTERM)
            while time.monotonic() < deadline and self._running():
                time.sleep(POLL)
        finally:  # at once, if a second Ctrl-C does not let us wait
            for rank in self.ranks:
                rank.signal(signal.SIGKILL)
            for rank in self.ranks:
                rank.process.wait()
            leftovers.end_processes(self.key)
            self.output.close()

    def _running(self) -> bool:
        for rank in self.ranks:
            rank.look()
        return any(rank.code is None for rank in self.ranks)

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End everything."""
        self.end()


def _reason(code: int) -> str:
    names = {128 + number: number.name for number in signal.Signals}
    return f"ended by {names[code]}" if code in names else f"exit code {code}"
