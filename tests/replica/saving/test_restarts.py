"""The scripts of the page on reliability under torchrun, which starts a killed worker again."""

import os
import re
import runpy
import shlex
import signal
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run

from ranks import fork_server, free_port
from test_docs import ROOT, blocks, script

PAGE = "docs/reliability.md"
SIZE, VICTIM, NEW = 2, "1", "new"
WAIT = 100.0  # seconds; a loss and two joins take about ten, the steps twenty
COMMAND = re.compile(r"^ *torchrun (.*) elastic.py localhost:29400 3 (?:\$rank|new) &$", re.M)


class Run:
    """One agent of torchrun for each worker, as the page starts them, and a process for the store.

    Agents are forked from the server; the workers are interpreters of their own.
    """

    def __init__(self, folder: Path) -> None:
        """Start ``SIZE`` workers, and one that is new."""
        for name in ("store.py", "elastic.py"):
            (folder / name).write_text(script(PAGE, name))
        commands = next(b for b in blocks(ROOT / PAGE, "bash") if "elastic.py" in b)
        (options,) = {*COMMAND.findall(commands)}
        port, self._logs = free_port(), folder / "logs"
        self._store = _start(_host, folder / "store.py", port)
        self.agents: dict[str, BaseProcess] = {}
        for rank in (*map(str, range(SIZE)), NEW):
            logs = ["--redirects=3", f"--log-dir={self._logs / rank}"]
            given = [str(folder / "elastic.py"), f"localhost:{port}", str(SIZE), rank]
            self.agents[rank] = _start(run.main, [*shlex.split(options), *logs, *given])

    def said(self, rank: str, restarts: int, stream: str = "stdout") -> str:
        """Return what a worker has printed since it was started again for so many times."""
        found = (self._logs / rank).glob(f"*/attempt_{restarts}/0/{stream}.log")
        return "".join(path.read_text() for path in found)

    def kill_worker(self, rank: str) -> None:
        """Kill the only child of an agent."""
        agent = self.agents[rank].pid
        (worker,) = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)

    def end(self) -> None:
        """End what still runs; an agent ends its worker."""
        running = [*self.agents.values(), self._store]
        for process in running:
            process.terminate()
        for process in running:
            process.join(10)
            process.kill()


def _start(work: Callable[..., Any], *args: Any) -> BaseProcess:
    process: BaseProcess = fork_server().Process(target=work, args=args)
    process.start()
    return process


def _host(path: Path, port: int) -> None:
    sys.argv = [str(path), str(port)]
    runpy.run_path(str(path), run_name="__main__")


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Run]:
    """End all processes with the test."""
    started = Run(tmp_path)
    yield started
    started.end()


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.fault(
    "a worker under torchrun is killed, after another one was added",
    "torchrun starts it again, and it joins; all train to the last step",
    group="Ranks that join",
)
def test_a_worker_that_torchrun_starts_again_joins(workers: Run) -> None:
    until = time.monotonic() + WAIT
    while "step" not in workers.said(NEW, 0):
        is_coming = time.monotonic() < until and workers.agents[NEW].is_alive()
        assert is_coming, workers.said(NEW, 0, "stderr")
        time.sleep(0.1)
    workers.kill_worker(VICTIM)
    until = time.monotonic() + WAIT
    for rank, agent in workers.agents.items():
        agent.join(max(0.0, until - time.monotonic()))
        assert agent.exitcode == 0, (rank, workers.said(rank, 0), workers.said(rank, 0, "stderr"))
    for rank, number in (("0", 0), (VICTIM, 1), (NEW, SIZE)):
        *steps, end = workers.said(rank, restarts=int(rank == VICTIM)).splitlines()
        found = re.fullmatch(rf"rank {number}: (\[.*\]) lost, (\[.*\]) joined", end)
        assert found is not None, end
        lost, joined = ([each["rank"] for each in literal_eval(text)] for text in found.groups())
        assert lost == ([] if rank == VICTIM else [1])
        assert joined == ([1] if rank == VICTIM else [SIZE, 1])
        assert steps[-1].startswith(f"rank {number}, step 1500: ")
    first = int(re.findall(r"step (\d+)", workers.said(VICTIM, restarts=1))[0])
    assert first > int(re.findall(r"step (\d+)", workers.said(VICTIM, restarts=0))[-1])
