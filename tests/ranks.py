"""Real processes for tests, forked from a server that has imported torch.

They start in milliseconds, where an interpreter that imports torch needs a second or more.
"""

import functools
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import run

HERE = Path(__file__).parent


@functools.cache
def fork_server(*more: str) -> ForkServerContext:
    """Start the server, once for all tests of this interpreter; it ends with the interpreter.

    Modules ``more`` are imported by it too, as far as they are there.
    """
    forkserver.set_forkserver_preload(["preloaded", *more])
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    # Both are read when the server starts: the path to find `preloaded`, the number by OpenMP.
    with patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Spawned:
    """Ranks without a launcher: torchrun would end the survivors of a killed worker itself."""

    def __init__(self, work: Any, size: int, *args: object, backend: str = "gloo") -> None:
        """Start ``work(rank, results, *args)`` in ``size`` processes around one store."""
        port = free_port()
        self.store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        server = fork_server()
        self.results = server.Queue()
        self.processes = [
            server.Process(
                target=_main, args=(work, rank, size, port, backend, self.results, *args)
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def join(self, timeout: float) -> list[Any]:
        """Return the results of all ranks that sent one; kill those that still run."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
        if late:
            raise TimeoutError(f"ranks {late} did not end within {timeout} s")
        results = []
        while not self.results.empty():
            results.append(self.results.get(timeout=5))
        return results


def _main(
    work: Any, rank: int, size: int, port: int, backend: str, results: Any, *args: object
) -> None:
    assert "preloaded" in sys.modules, "the server has failed to import what ranks need"
    # NCCL takes one rank for each GPU of a host. As hosts of their own, ranks can share one.
    os.environ["NCCL_HOSTID"] = str(rank)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    if store.add("ranks with a process group", 1) == size:
        store.set("all have one", "")
    store.wait(["all have one"])  # whoever ends at once would end the others' full mesh
    work(rank, results, *args)
    dist.destroy_process_group()


def torchrun(workers: int, script: Path, *arguments: str, python: str = sys.executable) -> str:
    """Run a script by the command torchrun, in the script's folder, and return what it prints."""
    launcher = [python, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={workers}", script.name, *arguments],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return printed(done.stdout)


def torchrun_forked(workers: int, script: Path, *arguments: str, logs: Path) -> str:
    """Run a script as torchrun does, with workers that are forked from the server.

    Torchrun's agent runs in this process. Its option ``--run-path`` runs the script inside the
    forked workers, so that no interpreter is started.
    """
    fork_server()
    forked = ["--standalone", f"--nproc-per-node={workers}", "--start-method=forkserver"]
    output = ["--redirects=3", f"--log-dir={logs}"]
    command = ["--run-path", str(HERE / "run_script.py"), str(script), *arguments]
    try:
        run.main([*forked, *output, *command])
    except BaseException as error:
        error.add_note(_logged(logs, "stderr")[-3000:])
        raise
    return printed(_logged(logs, "stdout"))


def printed(output: str) -> str:
    """Leave out what Gloo itself prints, in torch 2.10, when its ranks are connected."""
    return re.sub(r"^\[Gloo\] Rank .*\n", "", output, flags=re.MULTILINE)


def _logged(logs: Path, stream: str) -> str:
    return "".join(path.read_text() for path in sorted(logs.rglob(f"{stream}.log")))
