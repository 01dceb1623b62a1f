"""Real processes on shared memory."""

import errno
import os
import signal
import time
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import hogwild_scripts as scripts
from offbeat.hogwild import AsyncAdam, WorkerFailed, launch

pytestmark = pytest.mark.processes


def problem(workers: int) -> tuple[nn.Embedding, AsyncAdam]:
    torch.manual_seed(0)
    model = nn.Embedding(50, 1, sparse=True)
    return model, AsyncAdam(model.parameters(), lr=0.02, workers=workers)


def test_four_workers_lose_no_step_and_learn_as_much_as_one() -> None:
    serial, optimizer = problem(1)
    start = scripts.distance(serial).item()
    scripts.train(0, serial, optimizer, 1600)
    model, optimizer = problem(4)
    threads = launch(scripts.train, 4, args=(model, optimizer, 400))
    assert threads == [1] * 4
    assert optimizer.steps == 1600
    assert optimizer.skipped == 0
    counts = optimizer.state[model.weight]["step"]
    assert counts[:, 0].tolist() == [400] * 4
    assert all(tensor.isfinite().all() for tensor in optimizer.state[model.weight].values())
    # Of the way from the start to zero, within 5 % of what one worker goes in as many steps.
    gone = start - scripts.distance(serial).item()
    assert start - scripts.distance(model).item() >= 0.95 * gone


def test_results_come_by_number() -> None:
    results = launch(scripts.double, 2, args=(torch.ones(2),))
    assert torch.equal(torch.stack(results), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_the_first_failure_ends_all_and_shows_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"(?s)worker 1 raised.*no key in worker 1"):
        launch(scripts.fail, 2, args=(1,))
    assert time.monotonic() - start < 50  # the other sleeps for 60 s


def test_a_killed_worker_is_reported() -> None:
    model, optimizer = problem(2)
    deaths = torch.zeros(1)
    with pytest.raises(WorkerFailed, match="worker 1 was ended by SIGKILL"):
        launch(scripts.die, 2, args=(deaths, model, optimizer))


def test_a_worker_killed_in_mid_update_is_replaced_and_nothing_is_lost() -> None:
    model, optimizer = problem(2)
    deaths = torch.zeros(1)
    launch(scripts.die, 2, args=(deaths, model, optimizer), replacements=1)
    assert deaths.item() == 1
    assert optimizer.steps == 400
    assert optimizer.state[model.weight]["step"][:, 0].tolist() == [200, 201]
    assert scripts.distance(model) < 0.1  # 1.3 at the start


def test_an_end_without_a_result_is_a_failure() -> None:
    with pytest.raises(WorkerFailed, match="worker 0 ended with exit code 3"):
        launch(scripts.quit_silently, 1)


def test_ctrl_c_ends_all() -> None:
    pids = torch.zeros(2, dtype=torch.int64)
    # A shell that starts us in the background has us ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(scripts.interrupt, 2, args=(pids,))
    finally:
        signal.signal(signal.SIGINT, before)
    for pid in pids.tolist():
        with pytest.raises(ProcessLookupError) as gone:
            os.kill(pid, signal.SIG_DFL)
        assert gone.value.errno == errno.ESRCH


def test_a_failure_in_the_parent_ends_all() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        launch(scripts.fail, 1, args=(1,), meanwhile=Mock(side_effect=RuntimeError("no more")))


def test_state_that_would_not_be_shared_is_refused_in_the_worker() -> None:
    with pytest.raises(WorkerFailed, match="worker 0 builds or extends an AsyncAdam"):
        launch(scripts.build, 1)
    model, optimizer = problem(1)
    with pytest.raises(WorkerFailed, match="worker 1 uses an AsyncAdam for 1"):
        launch(scripts.step_with, 2, args=(model, optimizer))


REFUSED = [
    ((nn.Linear(1, 1),), r"'weight' of args\[0\] is on cpu, not in shared memory"),
    ((1, torch.optim.SGD([nn.Parameter(torch.ones(1))])), r"args\[1\] is a SGD, whose state"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_arguments_that_are_not_shared_are_refused(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(scripts.double, 2, args=arguments)


def test_buffers_must_be_shared_too() -> None:
    model = nn.BatchNorm1d(2)
    AsyncAdam(model.parameters())
    with pytest.raises(ValueError, match="'running_mean' of args"):
        launch(scripts.double, 2, args=(model,))


def test_a_function_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="defined at the top level of a module"):
        launch(lambda number: number, 2)
    with pytest.raises(ValueError, match="workers=0"):
        launch(scripts.who, 0)
