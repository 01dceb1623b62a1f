"""Workers of pytest-xdist that are forked from a server which has collected the tests."""

import json
import os
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from unittest.mock import patch

from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

from ranks import fork_server


def start_workers_by_fork(arguments: Sequence[str]) -> None:
    """Collect the tests of pytest's arguments, and let execnet fork workers that have them."""
    with patch.dict(os.environ, COLLECTED=json.dumps([os.fspath(each) for each in arguments])):
        fork_server("collected")
    gateway_io.Popen2IOMaster = ForkedWorker


class ForkedWorker(Popen2IO):
    """A process and the pipes to it, in place of those of execnet."""

    def __init__(self, args: list[str], execmodel: ExecModel) -> None:
        """Start the process, which runs ``python -u -c LINE``, the last of ``args``."""
        theirs, to_worker = Pipe(duplex=False)
        from_worker, its = Pipe(duplex=False)
        self.process = fork_server().Process(target=run_line, args=(theirs, its, args[-1]))
        self.process.start()
        for end in (theirs, its):
            end.close()
        files = (
            os.fdopen(os.dup(end.fileno()), mode)
            for end, mode in ((to_worker, "wb"), (from_worker, "rb"))
        )
        super().__init__(*files, execmodel=execmodel)
        for end in (to_worker, from_worker):
            end.close()

    def wait(self) -> int | None:
        """Wait until it has ended."""
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        """End it."""
        self.process.kill()


def run_line(commands: Connection, answers: Connection, line: str) -> None:
    """Read and write the pipes as stdin and stdout, and run a line of Python."""
    for number, end in enumerate((commands, answers)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    exec(line, {"__name__": "__main__"})
