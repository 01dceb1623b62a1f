"""What holds for all tests."""

import gc
import random
import warnings
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from importlib import import_module
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.nn.parallel import DistributedDataParallel

from offbeat.liveness.heartbeats import crossed_waits, heartbeat
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.replica.replica import Replica

# Imported by the server of forked processes only, and run by itself where Triton is installed; not
# searched for doctests.
collect_ignore = ["conftest.py", "preloaded.py", "collected.py", "kernels/compile_for_gpus.py"]
# Scripts of ranks, which import frameworks for seconds.
collect_ignore_glob = ["integrations/*_cases.py"]

WAITING = {"elastic", "liveness", "data"}  # for heartbeats, losses and loaders

# On a busy machine an example waits for its turn, and the first one may compile a kernel.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--seed``: another one makes tests draw other victims, steps, delays and numbers."""
    parser.addoption("--seed", type=int, default=0, help="seed of what tests draw (default: 0)")


def pytest_report_header(config: pytest.Config) -> str:
    """Show the seed, which repeats a run."""
    return f"seed: {config.getoption('seed')}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork the workers of pytest-xdist, each of which would import torch and tests for seconds."""
    from forked_workers import start_workers_by_fork

    start_workers_by_fork(config.invocation_params.args)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep the garbage collector from what is imported: each pass over it takes a second."""
    gc.disable()
    # As the first optimizer would, for seconds in which no thread of the process could beat.
    import_module("torch._dynamo")
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the files whose tests wait more than they compute evenly among the others.

    Each worker of pytest-xdist gets a run of them; those that wait would be left to the end, when
    the cores are idle.
    """
    if config.option.collectonly:  # the table of faults has the order of folders
        return
    files = [[*found] for _, found in groupby(items, key=lambda item: item.path)]
    waiting = [file for file in files if file[0].path.parent.name in WAITING]
    others, total = [file for file in files if file not in waiting], len(items)
    ordered, done = list[pytest.Item](), 0
    for file in others:
        while waiting and len(ordered) >= total * done / (done + len(waiting) + 1):
            ordered += waiting.pop(0)
            done += 1
        ordered += file
    items[:] = [*ordered, *(item for file in waiting for item in file)]


@pytest.fixture(autouse=True)
def draws(request: pytest.FixtureRequest) -> random.Random:
    """Random choices of a test, the same for the same ``--seed``; seeds torch's generator too."""
    seed = request.config.getoption("seed")
    torch.manual_seed(seed)
    return random.Random(f"{seed} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def detached_replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Detach what a test has left attached: its threads would go on beating, its sockets add up."""
    attach, attached = Replica.__init__, []

    @wraps(attach)
    def remember(self: Replica, *args: Any) -> None:
        attach(self, *args)
        attached.append(self)

    monkeypatch.setattr(Replica, "__init__", remember)
    yield
    if attached:  # at once: each waits a moment for the others
        with ThreadPoolExecutor(len(attached)) as pool:
            list(pool.map(Replica.detach, attached))
    # A rank that a test let die is no other replica of those of the next test.
    crossed_waits._all.clear()


@pytest.fixture(autouse=True)
def nothing_left_in_torch() -> None:
    """Reset the wrapper whose forward runs: of several threads the last may put back another's.

    torch.compile splits graphs where its buckets end, those of other tests' models too.
    """
    DistributedDataParallel._active_ddp_module = None


@pytest.fixture
def fast_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts in tenths of a second."""
    monkeypatch.setattr("offbeat.liveness.heartbeats.heartbeat.BEAT", 0.1)


@pytest.fixture(params=["alike", "unlike"])
def machine_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are the same on all ranks, or that some ranks lack."""
    if request.param == "unlike":
        found = iter(["", "numba 1", "numba 2"] * 9)
        asked = "offbeat.methods.adasum.operands.machine_code"
        monkeypatch.setattr(asked, lambda device: next(found))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Impatient heartbeats, all of which end with the test."""
    for name, seconds in {"BEAT": 0.1, "BROKEN_AFTER": 1.0, "SILENT_AFTER": 1.5}.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    start, started = Heartbeat.__init__, []

    def remember(self: Heartbeat, *args: Any) -> None:
        start(self, *args)
        started.append(self)

    monkeypatch.setattr(Heartbeat, "__init__", remember)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
    for one in started:
        one.stop()
