"""Ray Train restarts a run whose worker was killed, and it continues bit for bit."""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),  # Ray starts a dozen processes: half a minute on two idle cores
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the ray extra"),
]
CASES = Path(__file__).parent / "ray_cases.py"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default: workers would starve beside other tests
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # 2 by default: how soon a death is noticed
}


@pytest.fixture(scope="module")
def run() -> Iterator[dict[str, Any]]:
    """What the script says about the run; it starts and stops a Ray of its own."""
    # A short path, since Ray's sockets lie in it.
    with tempfile.TemporaryDirectory("", "ray", "/tmp", ignore_cleanup_errors=True) as folder:
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        done = subprocess.run(
            [sys.executable, str(CASES), folder],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, **SETTINGS, **own},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        *printed, facts = done.stdout.splitlines()
        yield json.loads(facts) | {"printed": "\n".join(printed)}


def test_the_example_learns(run: dict[str, Any]) -> None:
    (accuracy,) = re.findall(r"held-out loss .* accuracy ([\d.]+)", run["printed"])
    assert float(accuracy) > 0.5  # 0.1 untrained


def test_every_worker_resumes_from_its_own_part(run: dict[str, Any]) -> None:
    assert run["found"] == [True, True]
    assert run["resumed from"] == [8, 8]
    assert run["own parts"] == [True, True]
    assert run["ranks differed"]


def test_the_run_equals_an_uninterrupted_one_bit_for_bit(run: dict[str, Any]) -> None:
    assert run["as uninterrupted"] == [True, True]
    assert run["as uninterrupted at the end"] == [True, True]


def test_a_checkpoint_holds_the_parts_of_all_workers_and_the_average(run: dict[str, Any]) -> None:
    assert run["reports"] == [8, 12]  # the example keeps two
    assert run["files"] == [
        "model-critic.pt",
        "model.pt",
        "offbeat-save1-rank0-of-2.pt",
        "offbeat-save1-rank1-of-2.pt",
    ]
    assert run["average"] == [True, True]


def test_reports_show_the_stall_and_the_bytes_of_a_step(run: dict[str, Any]) -> None:
    assert run["metrics"]["steps"] == 12
    assert run["metrics"]["mb_sent"] > 0
    assert run["metrics"]["seconds_stalled"] >= 0
