"""A forked child leaves the threads and connections of its parent alone."""

import os
import subprocess
import sys

import pytest

from ranks import printed

# An interpreter of its own, since a child that ends must run through the end of Python. The ranks
# are threads; the child has none of them, and all of their sockets.
SCRIPT = """
import os, sys, time, warnings
import torch, offbeat
from offbeat.testing import ThreadWorld

warnings.simplefilter("ignore")
world = ThreadWorld(2)
attach = lambda world: offbeat.replicate(torch.nn.Linear(2, 2), offbeat.ad_psgd(), mesh=world)
replicas = world.run(attach)
step = lambda world: replicas[world.rank].step()
world.run(step)
for way in ("exit", "detach", "step", "worker"):
    child = os.fork()
    if child == 0:
        if way == "detach":
            replicas[0].detach()
        elif way == "step":
            try:
                replicas[0].step()
            except ValueError as error:
                assert "in a forked child of its process" in str(error)
        elif way == "worker":
            os._exit(0)
        sys.exit(0)
    until, ended = time.monotonic() + 50, 0  # it takes 5 s where others use the cores
    while not ended and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if not ended:
        os.kill(child, 9)
    print(way, status if ended else "hangs", flush=True)
    world.run(step, timeout=50)
time.sleep(1.2)  # a heartbeat: "left" would be read
world.run(step, timeout=50)
world.run(lambda world: (replicas[world.rank].finish(), replicas[world.rank].detach()))
print("parent done", flush=True)
"""


@pytest.mark.processes
@pytest.mark.fault(
    "a forked child of a rank exits, or calls detach()",
    "the child ends, the rank trains on",
)
def test_a_forked_child_neither_hangs_nor_disturbs_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    said = printed(done.stdout).splitlines()
    assert said == ["exit 0", "detach 0", "step 0", "worker 0", "parent done"], done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
