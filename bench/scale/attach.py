"""Seconds of attach, first step, finish and detach, and sockets and threads, by number of ranks.

Ranks are threads of one process, or processes around one store; both share the machine's cores.
"""

import multiprocessing
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.scale.lifetime import PHASES, WAIT, Sample, run_rank
from offbeat.testing import ThreadWorld

SIZES = (2, 4, 8, 16, 32, 64)
MESHES = {"sgp": 2, "ddp": 3}  # groups that a replica would open, were every one a full mesh
HEADINGS = ("ranks", "as", "method", *PHASES, "sockets / rank", "of a mesh", "threads / rank")
BENCH = Bench(
    name="scale/attach",
    claim="A replica connects to the ranks it speaks with, and starts in seconds",
    minutes=3,
    full_minutes=17,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Result:
    """The slowest rank's seconds by phase; sockets and threads per rank, their mean."""

    ranks: int
    kind: str
    method: str
    seconds: dict[str, float]
    sockets: float
    threads: float


def in_threads(ranks: int, method: str) -> list[Sample]:
    barrier = threading.Barrier(ranks, timeout=WAIT)
    work = lambda world: run_rank(method, world, barrier.wait, ranks)  # noqa: E731
    return ThreadWorld(ranks).run(work, timeout=WAIT)


def in_processes(ranks: int, method: str) -> list[Sample]:
    """Fork the ranks from a server that has imported torch, around a store of this process."""
    server = multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(["torch", "numba", "offbeat", __name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    samples = server.Queue()
    given = ranks, method, store.port, samples
    processes = [
        server.Process(target=_process, args=(r, *given), daemon=True) for r in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return [samples.get(timeout=WAIT) for _ in processes]
    except queue.Empty:
        raise TimeoutError(f"{ranks} processes did not end within {WAIT:.0f} s") from None
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


def _process(rank: int, ranks: int, method: str, port: int, samples: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = offbeat.World.of([[each] for each in range(ranks)])
    samples.put(run_rank(method, mesh, dist.barrier, 1))
    dist.destroy_process_group()


def measure(ranks: int, kind: str, method: str, turns: int) -> Result:
    """Run ``turns`` worlds one after the other; of times the median, over worlds."""
    run = in_threads if kind == "threads" else in_processes
    worlds = [run(ranks, method) for _ in range(turns)]
    return Result(
        ranks,
        kind,
        method,
        {p: float(np.median([max(s.seconds[p] for s in w) for w in worlds])) for p in PHASES},
        float(np.mean([s.sockets for s in worlds[-1]])),
        float(np.mean([s.threads for s in worlds[-1]])),
    )


def of_a_mesh(each: Result) -> float:
    """Return the sockets, as a share of those of full meshes with a listener each."""
    return each.sockets / (MESHES[each.method] * each.ranks)


def row(each: Result) -> tuple[str, ...]:
    return (
        f"{each.ranks}",
        each.kind,
        each.method,
        *(f"{each.seconds[phase]:.2f} s" for phase in PHASES),
        f"{each.sockets:.1f}",
        f"{of_a_mesh(each):.0%}",
        f"{each.threads:.1f}",
    )


def growth(results: Sequence[Result], phase: str) -> float:
    """Return the exponent a of seconds ~ n^a, fitted from 8 ranks on."""
    large = [each for each in results if each.ranks >= 8]
    n, seconds = zip(*((each.ranks, each.seconds[phase]) for each in large), strict=True)
    return float(np.polyfit(np.log(n), np.log(seconds), 1)[0])


def claims(results: Sequence[Result]) -> list[Claim]:
    largest = max(each.ranks for each in results)
    last = [each for each in results if each.ranks == largest]
    slowest = max(each.seconds["attach"] for each in last if each.kind == "threads")
    share = max(map(of_a_mesh, last))
    found = [
        Claim(f"attach of {largest} threads", "at most 8 s", f"{slowest:.1f} s", slowest <= 8),
        Claim(f"sockets at {largest}", "at most half of a mesh", f"{share:.0%}", share <= 0.5),
    ]
    for kind, method in dict.fromkeys((each.kind, each.method) for each in results):
        these = [each for each in results if (each.kind, each.method) == (kind, method)]
        if sum(each.ranks >= 8 for each in these) > 1:
            exponent = growth(these, "attach")
            name = f"attach of {method} in {kind} grows as"
            found.append(Claim(name, "n^1.5 or slower", f"n^{exponent:.1f}", exponent <= 1.5))
    return found


@app.command(epilog=BENCH.examples("--full", "--ranks 16 --ranks 64"))
def main(
    ranks: Annotated[list[int] | None, typer.Option("--ranks", help="Numbers of ranks.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Five worlds of each; 64 processes too.")
    ] = False,
) -> None:
    """Start and end worlds of 2 to 64 ranks."""
    results = []
    for kind in ("threads", "processes"):
        for method in MESHES:
            # Two cores take some minutes to start and end a world of 64 processes.
            for size in ranks or (SIZES if full or kind == "threads" else SIZES[:4]):
                results.append(measure(size, kind, method, 5 if full else 2))
                console.print("  ".join(row(results[-1])))
    title = "From attach to detach, on two cores that all ranks share"
    report(BENCH, title, HEADINGS, [*map(row, results)], claims(results), measured=results)


if __name__ == "__main__":
    app()
