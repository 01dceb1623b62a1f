"""The script of the page on elastic runs under torchrun, which starts a killed worker again."""

import os
import re
import shlex
import signal
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run

from offbeat.cli import app
from pages import ROOT, blocks, script
from ranks import fork_server, free_port

PAGE = "docs/elastic.md"
SIZE = 2
WAIT = 200.0  # seconds; a loss and two joins take about ten, the steps twenty, beside much else 100
COMMAND = re.compile(r"^ *torchrun (.*) elastic.py &", re.M)
END = re.compile(r"rank (\d+): (\[.*\]) lost, (\[.*\]) joined")


class Run:
    """One agent of torchrun for each worker, as the page starts them, and a process for the store.

    Agents are forked from the server; the workers are interpreters of their own.
    """

    def __init__(self, folder: Path) -> None:
        """Start the store and one more worker than begin the run."""
        (folder / "elastic.py").write_text(script(PAGE, "elastic.py"))
        commands = next(b for b in blocks(ROOT / PAGE, "bash") if "elastic.py" in b)
        (options,) = {*COMMAND.findall(commands)}
        port, self._logs = free_port(), folder / "logs"
        self._store = _start(app, ["store", f"--port={port}", f"--workers={SIZE}"])
        self.agents: dict[int, BaseProcess] = {}
        for worker in range(SIZE + 1):
            logs = ["--redirects=3", f"--log-dir={self._logs / str(worker)}"]
            given = [*shlex.split(options), *logs, str(folder / "elastic.py")]
            self.agents[worker] = _start(_launch, f"localhost:{port}", given)

    def said(self, worker: int, restarts: int, stream: str = "stdout") -> str:
        """Return what a worker has printed since it was started again for so many times."""
        found = (self._logs / str(worker)).glob(f"*/attempt_{restarts}/0/{stream}.log")
        return "".join(path.read_text() for path in found)

    def kill_worker(self, number: int) -> None:
        """Kill the only child of an agent."""
        agent = self.agents[number].pid
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


def _launch(store: str, arguments: list[str]) -> None:
    os.environ["OFFBEAT_STORE"] = store
    run.main(arguments)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Run]:
    """End all processes with the test."""
    started = Run(tmp_path)
    yield started
    started.end()


@pytest.mark.processes
@pytest.mark.timeout(450)
@pytest.mark.fault(
    "a worker under torchrun is killed",
    "it joins",
    group="Ranks that join",
)
def test_a_worker_that_torchrun_starts_again_joins(workers: Run) -> None:
    until = time.monotonic() + WAIT
    while not all("step" in workers.said(worker, 0) for worker in workers.agents):
        is_coming = time.monotonic() < until and all(a.is_alive() for a in workers.agents.values())
        assert is_coming, [workers.said(worker, 0, "stderr") for worker in workers.agents]
        time.sleep(0.1)
    victim = 1
    workers.kill_worker(victim)
    until, found = time.monotonic() + WAIT, []
    for worker, agent in workers.agents.items():
        agent.join(max(0.0, until - time.monotonic()))
        assert agent.exitcode == 0, (worker, workers.said(worker, 0, "stderr"))
        *steps, end = workers.said(worker, restarts=int(worker == victim)).splitlines()
        assert steps[-1].startswith("step 1500: ")
        said = END.fullmatch(end)
        assert said is not None, end
        found.append([literal_eval(text) for text in said.groups()])
    ranks = [rank for rank, *_ in found]
    assert ranks[victim] == SIZE + 1, "a process that was started again gets a new number"
    (lost,) = {*range(SIZE + 2)} - {*ranks}
    for _, losses, joins in found:
        assert [each["rank"] for each in losses] == [lost]
        assert [each["rank"] for each in joins] == [SIZE, SIZE + 1]
    first = int(re.findall(r"step (\d+)", workers.said(victim, restarts=1))[0])
    assert first > int(re.findall(r"step (\d+)", workers.said(victim, restarts=0))[-1])
