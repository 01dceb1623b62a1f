"""A replica connects to the ranks it speaks with, and starts in seconds.

Seconds of attach, first step, finish and detach, and sockets and threads, by number of ranks. Ranks
are threads of one process, or processes around one store; both share the machine's cores.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import offbeat
from bench.harness import Bench, Claim, Result, command
from bench.harness.growth import exponent, sweep
from bench.harness.turns import Work, seconds_of
from offbeat.testing import ThreadWorld

SIZES = (2, 4, 8, 16, 32, 64)
MESHES = {"sgp": 2, "ddp": 3}  # groups that a replica would open, were every one a full mesh
PHASES = ("attach", "first step", "finish", "detach")
WAIT = 300.0  # seconds for one run
HEADINGS = ("ranks", "as", "method", *PHASES, "sockets / rank", "of a mesh", "threads / rank")
BENCH = Bench(name="scale/attach", minutes=3, full_minutes=17)
Life = dict[str, float]  # seconds by phase, and sockets and threads, of a rank
World = dict[str, Any]  # the same of all ranks, and what they are


def sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(entry))
    return {name for name in found if name.startswith("socket")}


def threads() -> int:
    """The number of threads of this process, those of Gloo among them."""
    return len(os.listdir("/proc/self/task"))


def live(method: str, mesh: Any, meet: Callable[[], Any], sharing: int) -> Life:
    """Attach, step, finish and detach; ``sharing`` ranks live in this process, and ``meet``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = SGD(model.parameters(), lr=0.1)

    def train() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()

    def step() -> None:
        train()
        replica.step()

    train()  # which imports a second's worth of torch at first
    optimizer.zero_grad()
    meet()
    before, idle = sockets(), threads()
    meet()
    began = time.perf_counter()
    replica = offbeat.replicate(model, offbeat.algorithm(method), mesh=mesh)
    found = {"attach": time.perf_counter() - began}
    meet()
    found["sockets"] = len(sockets() - before) / sharing
    found["threads"] = (threads() - idle) / sharing
    phases: tuple[Work, ...] = step, replica.finish, replica.detach
    for name, work in zip(PHASES[1:], phases, strict=True):
        meet()
        found[name] = seconds_of(work)
    meet()
    return found


def in_threads(ranks: int, method: str) -> list[Life]:
    barrier = threading.Barrier(ranks, timeout=WAIT)
    work = lambda world: live(method, world, barrier.wait, ranks)  # noqa: E731
    return ThreadWorld(ranks).run(work, timeout=WAIT)


def in_processes(ranks: int, method: str) -> list[Life]:
    """Fork the ranks from a server that has imported torch, around a store of this process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "numba", "offbeat", __name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with server.Pool(ranks) as pool:  # each of them takes one rank, which waits for all others
        work = partial(in_process, ranks, method, store.port)
        return pool.map_async(work, range(ranks), chunksize=1).get(WAIT)


def in_process(ranks: int, method: str, port: int, rank: int) -> Life:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = offbeat.World.of([[each] for each in range(ranks)])
    found = live(method, mesh, dist.barrier, 1)
    dist.destroy_process_group()
    return found


def measure(ranks: int, kind: str, method: str, turns: int) -> World:
    """Of ``turns`` worlds the median of the slowest rank's seconds; means of what ranks hold."""
    run = in_threads if kind == "threads" else in_processes
    worlds = [run(ranks, method) for _ in range(turns)]
    found = {p: median(max(rank[p] for rank in world) for world in worlds) for p in PHASES}
    held = {name: fmean(rank[name] for rank in worlds[-1]) for name in ("sockets", "threads")}
    mesh = MESHES[method] * ranks  # with a listener for each group
    of_a_mesh = {"of a mesh": held["sockets"] / mesh}
    return {"ranks": ranks, "kind": kind, "method": method, **found, **held, **of_a_mesh}


def row(world: World) -> tuple[str, ...]:
    seconds = (f"{world[phase]:.2f} s" for phase in PHASES)
    held = f"{world['sockets']:.1f}", f"{world['of a mesh']:.0%}", f"{world['threads']:.1f}"
    return f"{world['ranks']}", world["kind"], world["method"], *seconds, *held


def claims(worlds: Sequence[World]) -> list[Claim]:
    largest = max(each["ranks"] for each in worlds)
    last = [each for each in worlds if each["ranks"] == largest]
    slowest = max(each["attach"] for each in last if each["kind"] == "threads")
    share = max(each["of a mesh"] for each in last)
    found = [
        Claim(f"attach of {largest} threads", "at most 8 s", f"{slowest:.1f} s", slowest <= 8),
        Claim(f"sockets at {largest}", "at most half of a mesh", f"{share:.0%}", share <= 0.5),
    ]
    for kind, method in dict.fromkeys((each["kind"], each["method"]) for each in worlds):
        same = [each for each in worlds if (each["kind"], each["method"]) == (kind, method)]
        attach = {each["ranks"]: each["attach"] for each in same if each["ranks"] >= 8}
        if len(attach) > 1:
            power = exponent([*attach], [*attach.values()])
            name = f"attach of {method} in {kind} grows as"
            found.append(Claim(name, "n^1.5 or slower", f"n^{power:.1f}", power <= 1.5))
    return found


@command(
    BENCH, "--full", "--ranks 16 --ranks 64",
    ranks="Numbers of ranks.", full="Five worlds of each; 64 processes too.",
)  # fmt: skip
def app(ranks: list[int] | None = None, full: bool = False) -> Result:
    # Two cores take some minutes to start and end a world of 64 processes.
    sizes = {"threads": ranks or SIZES, "processes": ranks or (SIZES if full else SIZES[:4])}
    turns = 5 if full else 2
    cases = [(n, kind, method, turns) for kind in sizes for method in MESHES for n in sizes[kind]]
    worlds = sweep(cases, measure, row)
    title = "From attach to detach, on two cores that all ranks share"
    return Result(title, HEADINGS, [*map(row, worlds)], claims(worlds), worlds)
