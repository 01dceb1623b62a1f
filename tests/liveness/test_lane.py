"""The thread of a group: jobs one after the other, and none after the group was closed."""

import threading
import time

import pytest

from offbeat.liveness.lane import Lane
from offbeat.platform.left_threads import await_left


def test_jobs_run_in_the_order_submitted_and_errors_reach_their_futures() -> None:
    lane, done = Lane("lane", wake=lambda: None), list[int]()

    def fail() -> None:
        raise ValueError("of this job")

    first, wrong, last = lane.submit(done.append, 1), lane.submit(fail), lane.submit(done.append, 2)
    last.result(10)
    assert (first.result(), done) == (None, [1, 2])
    with pytest.raises(ValueError, match="of this job"):
        wrong.result()
    lane.close()


def test_no_job_starts_after_one_that_was_woken() -> None:
    """Its messages would meet a peer's receives for the rest of the job before it."""
    woken, started, done = threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        started.set()
        assert woken.wait(10)
        raise RuntimeError("woken")

    lane = Lane("lane", wake=woken.set)
    running, waiting = lane.submit(wait), lane.submit(done.append, 1)
    assert started.wait(10)
    lane.close()
    with pytest.raises(RuntimeError, match="woken"):
        running.result(10)
    with pytest.raises(RuntimeError, match="this rank has closed the group"):
        waiting.result(10)
    assert done == []


def test_a_thread_that_did_not_end_is_awaited_before_python_ends() -> None:
    lane = Lane("lane", wake=lambda: None)
    started, is_over, ended = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        is_over.wait()
        time.sleep(0.2)
        ended.set()

    lane.submit(job)
    assert started.wait(10)
    lane.close(patience=0.01)
    is_over.set()
    assert not ended.is_set()
    await_left(10)
    assert ended.is_set()
