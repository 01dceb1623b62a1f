"""The thread of a group: jobs one after the other, and none after the group was closed."""

import threading

import pytest

from offbeat.liveness.lane import Lane


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
