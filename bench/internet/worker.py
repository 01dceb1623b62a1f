"""One life of a rank of :mod:`bench.internet.outage`: the folder, the recipe, the last step."""

import os
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore

from bench.elastic.worker import work


def main(folder: str, text: str, last: str, pause: str) -> None:
    """Train to the last step, and write what happens."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    print(f"pid {os.getpid()}", flush=True)
    TCPStore(host, int(port), is_master=False).set("last", last)
    path = Path(folder, f"{rank}.{time.monotonic_ns()}")
    work(f"{host}:{port}", size, rank, text, float(pause), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
