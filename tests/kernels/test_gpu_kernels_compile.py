"""Kernels compile to machine code for GPUs that are not there, with wide accesses."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
]
SCRIPT = Path(__file__).with_name("compile_for_gpus.py")
ARCHITECTURES = ("80", "90")
SINGLE = ("odd", "sums")  # elements at any address; sums of few numbers


def test_every_kernel_compiles() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, *ARCHITECTURES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 24 * len(ARCHITECTURES)
    for name, counts in found.items():
        assert counts["bytes"] > 0
        # Whether messages come early must change no rounding, and quotients must be those of torch.
        assert counts["fused"] == counts["approximate"] == 0, name
        assert (counts["wide"] > 0) != any(part in name for part in SINGLE), name
        if name.startswith(("fill, sm", "cast")):
            assert counts["rounded"] > 0, "a cast to bfloat16 rounds to the nearest"
