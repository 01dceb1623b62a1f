"""One run under a schedule of kills: real processes around one store, or torchft's lighthouse."""

import multiprocessing as mp
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from bench.elastic.score import Life, Score, read, score
from bench.elastic.worker import Log, work
from bench.harness.environment import environment

# Torch looks up the name of each address that it connects to, for 5 s by default.
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
RESTART = 1.0  # seconds from a kill to the start of the next process of that rank
HANG = 120.0  # seconds, and ten steps, without what must come; kernels compile meanwhile
PERIOD = 5.0  # seconds, of which those between two kills are a multiple
MARGIN = 3  # steps from the announcement of the last one to that one


@dataclass(frozen=True)
class Case:
    """A recipe, or one of torchft, under a schedule."""

    text: str
    every: float  # seconds between two kills
    seconds: float
    workers: int = 4
    step: float = 1.0
    steps: int | None = None  # the last step; otherwise a common one after all kills
    seed: int = 1  # of who is killed
    after: float = 0.0  # seconds after a multiple of 5 at which kills come

    @property
    def is_peer(self) -> bool:
        return self.text.startswith("torchft")


@dataclass
class Run:
    """What has happened."""

    case: Case
    kills: int = 0
    fault: str = ""  # a hang, an end by itself, or models that differ at the end
    score: Score = field(default_factory=Score)
    heldout: float = nan  # the loss of the workers, at the end
    steps: int = 0  # until then


class Crew:
    """The workers of a run, each with the file of its log."""

    def __init__(self, context: BaseContext, case: Case, folder: Path) -> None:
        self.context: Any = context
        self.case, self.folder, self.run = case, folder, Run(case)
        self.running: dict[int, tuple[Any, Path]] = {}
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if case.steps is not None:
            self.store.set("last", str(case.steps))
        self.work: Callable[..., None] = work
        self.args: tuple[Any, ...] = f"127.0.0.1:{self.store.port}", case.workers
        if case.is_peer:
            from bench.elastic import peer  # only where torchft is installed

            here, there = self.context.Pipe()
            self.lighthouse = self.context.Process(target=peer.host, args=(there,), daemon=True)
            self.lighthouse.start()
            self.work, self.args = peer.work, (here.recv(),)
        for rank in range(case.workers):
            self.start(rank)

    def start(self, rank: int) -> None:
        path = self.folder / f"{rank}.{time.monotonic_ns()}"
        args = *self.args, rank, self.case.text, self.case.step, path
        process = self.context.Process(target=self.work, args=args, daemon=True)
        process.start()
        self.running[rank] = process, path

    def end(self, rank: int, how: str) -> None:
        process, path = self.running.pop(rank)
        process.kill()
        Log(path)(how)
        process.join()

    def look(self) -> None:
        """Note workers that have ended by themselves with an error."""
        for rank, (process, _) in self.running.items():
            if process.exitcode not in (None, 0):
                self.run.fault = f"rank {rank} ended with {process.exitcode}"

    def wait_for(self, kind: str, what: str) -> None:
        until = time.monotonic() + HANG + 10 * self.case.step
        while not self.run.fault:
            logs = [path.read_text("utf-8") for _, path in self.running.values() if path.exists()]
            if sum(f'["{kind}"' in log for log in logs) == len(self.running):
                return
            time.sleep(0.05)
            self.look()
            if time.monotonic() > until:
                self.run.fault = f"hangs: {what}"

    def kill_and_restart(self, begin: float) -> list[int]:
        """Disturb the run for its time; the ranks that are still to start again."""
        case, victims = self.case, random.Random(self.case.seed)
        due, next_kill = list[tuple[float, int]](), begin + case.every
        while (now := time.monotonic()) < begin + case.seconds and not self.run.fault:
            if now >= next_kill and self.running:
                rank = victims.choice(sorted(self.running))
                self.end(rank, "killed")
                self.run.kills += 1
                due.append((time.monotonic() + RESTART, rank))
                next_kill += case.every
            while due and due[0][0] <= now:
                self.start(due.pop(0)[1])
            self.look()
            time.sleep(0.02)
        return [rank for _, rank in due]

    def finish(self, missing: list[int]) -> None:
        """Let all come in, train on to a common last step, and end."""
        for rank in missing:
            self.start(rank)
        self.wait_for("end", "join")
        if self.case.steps is None and not self.run.fault:
            steps = [Life.read(path).steps[-1].number for _, path in self.running.values()]
            self.store.set("last", str(max(steps) + MARGIN))
        self.wait_for("out", "finish")


def forking(*modules: str) -> BaseContext:
    """The context of processes that fork from one which has imported all."""
    os.environ |= environment() | RESOLVER
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["bench.elastic.runs", "bench.harness.command", *modules])
    return context


def disturb(context: BaseContext, case: Case) -> Run:
    """Make one run, and add up what the workers did."""
    with tempfile.TemporaryDirectory() as name:
        crew = Crew(context, case, Path(name))
        crew.wait_for("end", "start")
        now = time.monotonic()
        begin = now + (case.after - now) % PERIOD
        missing = crew.kill_and_restart(begin)
        end, run = time.monotonic(), crew.run
        if not case.is_peer and not run.fault:
            crew.finish(missing)
        for rank in [*crew.running]:
            crew.end(rank, "stopped")
        if case.is_peer:
            crew.lighthouse.kill()
        lives = read(Path(name))
    ends = [life for life in lives if life.digest is not None]
    if len({life.digest for life in ends}) > 1:
        run.fault += " models differ"
    for life in ends:
        run.heldout, run.steps = life.heldout, life.made
    run.score = score(lives, case.step, begin, end)
    return run
