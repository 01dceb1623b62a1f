"""`offbeat store` and ranks, all of them real processes: the store is killed, ranks come and go."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import offbeat
from offbeat.cli import app
from ranks import fork_server, free_port

AFTER = 60  # steps that all make after they were told to end


class StoreProcess:
    """`offbeat store`, started again at the same port."""

    def __init__(self, *options: str) -> None:
        self.port, self.page, self.options = free_port(), 0, options
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "offbeat", "store", f"--port={self.port}", "--page=0"]
        self.process = subprocess.Popen(
            [*command, *self.options],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stderr is not None
        found = re.search(r"http://.*:(\d+)/", self.process.stderr.readline())
        assert found is not None
        self.page = int(found[1])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=20)

    def status(self) -> dict[str, Any]:
        address = f"http://127.0.0.1:{self.page}/status.json"
        with urllib.request.urlopen(address, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def wait(self, is_so: Callable[[dict[str, Any]], bool], seconds: float = 40) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while not is_so(found := self.status()):
            assert time.monotonic() < until, found
            time.sleep(0.1)
        return found

    def end(self) -> list[dict[str, Any]]:
        """End it as a supervisor does; return the lines it has printed."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    found = StoreProcess("--workers=3", "--json")
    found.start()
    yield found
    if found.process is not None:
        found.process.kill()
        found.process.communicate(timeout=20)


def work(address: str, until: Any, progress: Any, results: Any) -> None:
    """Train until the step in ``until``, and tell what has happened."""
    os.environ["OFFBEAT_STORE"] = address
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = offbeat.sgp()
    replica = offbeat.replicate(model, algorithm, optimizer=optimizer, elastic=True)
    while replica.steps < until.value:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        progress.value = max(progress.value, replica.steps)
        time.sleep(0.02)
    replica.finish()
    stats = replica.stats()
    result = (replica.world.rank, replica.steps, len(stats["lost"]), len(stats["joined"]))
    results.put((*result, model.weight.tolist()))
    replica.detach()


@pytest.mark.processes
@pytest.mark.timeout(170)
@pytest.mark.fault(
    "`offbeat store` is killed and started again at its address, also when rank 0 has gone",
    "no step is lost, no rank ends, and others join",
    group="Losses that a run survives",
)
@pytest.mark.filterwarnings("ignore")
def test_the_store_is_killed_and_started_again(store: StoreProcess) -> None:
    server = fork_server()
    until, progress, results = server.Value("i", 2**30), server.Value("i", 0), server.Queue()
    address = f"127.0.0.1:{store.port}"

    def start() -> Any:
        process = server.Process(target=work, args=(address, until, progress, results))
        process.start()
        return process

    ranks = [start()]
    try:
        store.wait(lambda status: status["waiting"] == 1)  # it will be rank 0
        ranks += [start(), start()]
        before = store.wait(lambda status: status["step"] > 10)
        assert (before["state"], [m["rank"] for m in before["members"]]) == ("training", [0, 1, 2])
        ranks.pop(0).kill()
        store.wait(lambda status: [each["rank"] for each in status["lost"]] == [0])
        store.kill()
        time.sleep(1.0)  # whoever was in a step at that moment has ended it
        away = progress.value
        time.sleep(1.0)
        assert progress.value > away  # exchanges do not need it
        store.start()
        after = store.wait(lambda status: len(status["members"]) == 2 and status["step"] > away)
        assert after["run"] == before["run"]
        ranks.append(start())
        joined = store.wait(lambda status: [c["rank"] for c in status["joined"]] == [3])
        ranks.pop(0).kill()
        store.wait(lambda status: status["step"] > joined["step"] + AFTER)
        time.sleep(1)
        until.value = store.status()["step"] + AFTER
        found = sorted(results.get(timeout=60) for _ in range(2))
    finally:
        for rank in ranks:
            rank.join(20)
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert {(steps, count) for _, steps, _, count, *_ in found} == {(until.value, 1)}
    # The loss comes before or after the join, of which the new rank knows only what came after.
    assert [lost for rank, _, lost, *_ in found if rank != 3] == [2]
    assert len({str(result[4]) for result in found}) == 1
    lines = store.end()
    assert [line["rank"] for line in lines[-1]["joined"]] == [3]
    assert all(line["seconds_lost"] < 30 for line in lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "0"], "--workers 0, expected the number of processes"),
        (["--settle", "-1"], "--settle -1.0, expected seconds"),
        (["--workers", "2", "--settle", "5"], "exclude each other"),
        (["--port", "99999"], "port 99999: no store can listen there"),
    ],
)
@pytest.mark.fault("`offbeat store` gets a wrong option or a port that is taken", "exit code 2")
def test_wrong_options(options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["store", *options])
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output
