"""Real processes on shared memory."""

import errno
import os
import signal
import sys
import time
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import hogwild_scripts as scripts
from offbeat.hogwild import AsyncAdam, WorkerFailed, launch
from offbeat.hogwild.launch import _death

pytestmark = pytest.mark.processes


def problem(workers: int) -> tuple[nn.Embedding, AsyncAdam]:
    torch.manual_seed(0)
    model = nn.Embedding(50, 1, sparse=True)
    return model, AsyncAdam(model.parameters(), lr=0.02, workers=workers)


@dataclass
class Trained:
    """What two workers left behind and said."""

    start: float
    model: nn.Embedding
    optimizer: AsyncAdam
    few: AsyncAdam
    said: list[tuple[Tensor, list[str]]]


@pytest.fixture(scope="module")
def two() -> Trained:
    """Two workers, of which one was killed and replaced; once, since starting takes long."""
    model, optimizer = problem(2)
    start, lives = scripts.distance(model).item(), torch.zeros(1)
    _, few = problem(1)
    said = launch(scripts.train_and_err, 2, args=(lives, model, optimizer, few), replacements=1)
    assert lives.item() == 2
    return Trained(start, model, optimizer, few, said)


@pytest.mark.fault(
    "a worker is killed, with replacements allowed",
    "a new worker takes its number; at most one update is lost",
)
def test_two_workers_of_which_one_was_killed_learn_as_much_as_one(two: Trained) -> None:
    serial, optimizer = problem(1)
    scripts.train(0, serial, optimizer, 800)
    state = two.optimizer.state[two.model.weight]
    assert two.optimizer.steps == 800
    assert two.optimizer.skipped == 0
    assert state["step"][:, 0].tolist() == [400, 401]  # one begun, never finished
    assert all(tensor.isfinite().all() for tensor in state.values())
    # Of the way from the start to zero, within 5 % of what one worker goes in as many steps.
    gone = two.start - scripts.distance(serial).item()
    assert two.start - scripts.distance(two.model).item() >= 0.95 * gone


def test_results_come_by_number_from_workers_with_one_thread(two: Trained) -> None:
    assert torch.stack([who for who, _ in two.said]).tolist() == [[0, 1], [1, 1]]


@pytest.mark.fault("a worker builds an optimizer of its own", "ValueError in the worker")
def test_what_others_would_not_see_is_refused_in_the_worker(two: Trained) -> None:
    (built, extended), (few, forked) = (messages for _, messages in two.said)
    assert built.startswith("worker 0 builds or extends an AsyncAdam whose state the others")
    assert few.startswith("worker 1 uses an AsyncAdam for 1; build it with the number")
    assert forked.startswith("this process was forked after the optimizer was built")
    assert extended.startswith("worker 0 builds or extends an AsyncAdam")
    assert two.few.steps == 0


def test_trained_state_is_saved_and_workers_go_on_from_it(two: Trained) -> None:
    """What the workers wrote is what the parent saves, and what the next ones count on from."""
    resumed, optimizer = problem(2)
    resumed.load_state_dict(two.model.state_dict())
    optimizer.load_state_dict(two.optimizer.state_dict())
    state, saved = optimizer.state[resumed.weight], two.optimizer.state[two.model.weight]
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    worker = optimizer.as_worker(0)
    assert 800 < worker._tick(worker._target(resumed.weight, 0)) <= 802


@pytest.mark.fault("a worker raises", "WorkerFailed with its traceback; all workers end")
def test_the_first_failure_ends_all_and_shows_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"(?s)worker 1 raised.*no key in worker 1"):
        launch(scripts.fail, 2, args=(1,))
    assert time.monotonic() - start < 50  # the other sleeps for 60 s


@pytest.mark.fault(
    "a worker is killed, without replacements", "WorkerFailed; names the worker and the signal"
)
def test_a_killed_worker_is_reported() -> None:
    with pytest.raises(WorkerFailed, match="worker 0 was ended by SIGKILL"):
        launch(scripts.die_while_sending, 1)


@pytest.mark.fault(
    "a worker returns, but a thread of it goes on", "it is ended; the failure of another is told"
)
def test_a_worker_that_lingers_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["offbeat.hogwild.launch"], "ENDING", 1.0)
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="of worker 1"):
        launch(scripts.linger_or_raise, 2)
    assert time.monotonic() - started < 50, "not as long as the thread"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "was ended by SIGKILL"),
        (-35, "was ended by signal 35"),  # a signal without a name
        (3, "ended with exit code 3 and without a result"),
    ],
)
def test_how_a_worker_ended_is_said(code: int, said: str) -> None:
    assert _death(code) == said


@pytest.mark.fault("Ctrl-C", "all workers end")
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


@pytest.mark.fault("the parent raises", "all workers end")
def test_a_failure_in_the_parent_ends_all() -> None:
    with pytest.raises(RuntimeError, match="no more"):
        launch(scripts.fail, 1, args=(1,), meanwhile=Mock(side_effect=RuntimeError("no more")))


REFUSED = [
    ((nn.Linear(1, 1),), r"'weight' of args\[0\] is on cpu, not in shared memory"),
    ((1, torch.optim.SGD([nn.Parameter(torch.ones(1))])), r"args\[1\] is a SGD, whose state"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
@pytest.mark.fault(
    "arguments of the workers are not in shared memory", "ValueError; names the tensor"
)
def test_arguments_that_are_not_shared_are_refused(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(scripts.double, 2, args=arguments)


@pytest.mark.fault(
    "arguments of the workers are not in shared memory", "ValueError; names the tensor"
)
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
