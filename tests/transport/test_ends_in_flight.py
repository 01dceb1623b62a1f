"""A process that ends while another thread of offbeat is in a call of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from ranks import torchrun


@pytest.mark.processes
@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="Python 3.12.1 starts no threads at exit"
)
@pytest.mark.fault(
    "a process ends while one of its calls waits",
    "it keeps its exit status",
)
@pytest.mark.parametrize("call", ["store_call", "returning_call", "opening", "exchange"])
def test_a_call_that_is_in_flight_at_the_end_does_not_abort_the_process(call: str) -> None:
    script = Path(__file__).with_name("ends_in_flight.py")
    ended = subprocess.run(
        [sys.executable, script, call], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.processes
def test_the_default_group_ends_where_it_is_destroyed() -> None:
    """No thread of it may be left that ends a message while Python ends."""
    printed = torchrun(2, Path(__file__).with_name("destroyed.py"))
    assert printed.count("left: []") == 2, printed
