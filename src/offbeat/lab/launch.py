"""The processes of a run: started, supervised and terminated together."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, final

from offbeat.lab import enter, leftovers
from offbeat.lab.output import Output

POLL_SECONDS = 0.02  # between two polls of all ranks
GRACE = 5.0  # seconds from SIGTERM to SIGKILL


class Entry(NamedTuple):
    """The namespaces that a rank enters to run on a node; empty on loopback."""

    namespace: str = ""  # path of the network namespace
    hosts: str = ""  # lines that precede those of /etc/hosts


def require_executable(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise ValueError if ``command`` is empty or cannot be started."""
    if not command:
        raise ValueError(
            "no command: expected one after the options, for example: "
            "offbeat lab --nodes 2 -- python train.py"
        )
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ValueError(
            f"the command {command[0]!r} was not found on PATH, or is not executable; pass a "
            "program and its arguments, for example: python train.py"
        )


@final
@dataclass(eq=False)
class RankProcess:
    """The process of one rank, which leads a process group of its own."""

    number: int
    node: int
    process: subprocess.Popen[bytes]
    killed: bool = False  # by a fault
    code: int | None = None  # as a shell reports it, once the process has ended

    def poll(self) -> bool:
        """Return whether the process has ended since the last call."""
        if self.code is not None:
            return False
        # WNOWAIT leaves the process a zombie until the end of the run. Its id cannot be reused
        # meanwhile, so that a signal to its group never reaches an unrelated process.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, self.process.pid, flags)
        if status is not None:
            exited = status.si_code == os.CLD_EXITED
            self.code = status.si_status + (0 if exited else 128)
        return status is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process group of the rank."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


@final
@dataclass
class RankProcesses(AbstractContextManager["RankProcesses"]):
    """The processes of all ranks of one run; leaving the context terminates them.

    Processes that ranks have started are terminated too. ``key`` marks the processes of this lab,
    see :mod:`~offbeat.lab.leftovers`.
    """

    output: Output
    key: str
    ranks: list[RankProcess] = field(default_factory=list)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], node: int, entry: Entry
    ) -> None:
        """Start the next rank.

        The calling thread must outlive the run: the kernel kills the ranks when it ends.
        """
        number = len(self.ranks)
        with self.output.sink(number) as sink:
            process = subprocess.Popen(
                enter.command_in(*entry, command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the lab, which terminates the ranks
            )
        self.ranks.append(RankProcess(number, node, process))

    def supervise(self, keep_going: bool) -> int:
        """Wait for all ranks; return the exit code of the first that failed, or 0.

        Unless ``keep_going``, returns as soon as a rank has failed.
        """
        failed = 0
        while any(rank.code is None for rank in self.ranks):
            self.output.raise_error()
            for rank in self.ranks:
                if not rank.poll() or rank.code == 0 or rank.killed:
                    continue
                failed = failed or rank.code or 0
                ending = (
                    "" if keep_going else "; terminating the other ranks (--keep-going keeps them)"
                )
                self.output.log(f"rank {rank.number} failed: {_reason(rank.code or 0)}{ending}")
                if not keep_going:
                    return failed
            time.sleep(POLL_SECONDS)
        return failed

    def kill(self, number: int) -> None:
        """Kill a rank with SIGKILL; its exit code does not count as a failure."""
        rank = self.ranks[number]
        if rank.code is not None:
            self.output.log(f"rank {number} was not killed: it has already ended")
            return
        rank.killed = True
        rank.signal(signal.SIGKILL)
        self.output.log(f"rank {number} killed")

    def signal_node(self, node: int, number: int) -> None:
        """Send a signal to all ranks of a node."""
        for rank in self.ranks:
            if rank.node == node:
                rank.signal(number)

    def __exit__(self, *_: object) -> None:
        """Send SIGTERM, after the grace period SIGKILL, also to what the ranks have started."""
        try:
            deadline = time.monotonic() + GRACE
            for rank in self.ranks:
                if rank.code is None:
                    rank.signal(signal.SIGTERM)
            while time.monotonic() < deadline and self._running():
                time.sleep(POLL_SECONDS)
        finally:  # also when a second Ctrl-C interrupts the grace period
            for rank in self.ranks:
                rank.signal(signal.SIGKILL)
            for rank in self.ranks:
                rank.process.wait()
            leftovers.end_processes(self.key)
            self.output.close()

    def _running(self) -> bool:
        for rank in self.ranks:
            rank.poll()
        return any(rank.code is None for rank in self.ranks)


def _reason(code: int) -> str:
    names = {128 + number: number.name for number in signal.Signals}
    return f"killed by {names[code]}" if code in names else f"exit code {code}"
