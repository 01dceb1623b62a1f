"""One run under a schedule of kills: real processes around one store, or torchft's lighthouse."""

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

from bench.elastic.score import Life, Score, score
from bench.elastic.worker import work

RESTART = 1.0  # seconds from a kill to the start of the next process of that rank
HANG = 120.0  # seconds, and ten steps, without what must come; kernels compile meanwhile
MARGIN = 3  # steps from the announcement of the last one to that one
INTERVAL = 4  # steps of torchft's DiLoCo


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


class Killer:
    """Starts the workers of a run, kills one after the other, and starts them again."""

    def __init__(self, context: BaseContext, case: Case, folder: Path) -> None:
        self._context: Any = context
        self._case, self._folder, self.run = case, folder, Run(case)
        self._started, self._past = 0, list[tuple[Path, int, float, bool]]()
        self._running: dict[int, tuple[Any, Path]] = {}
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if case.steps is not None:
            self._store.set("last", str(case.steps))
        self._lighthouse: Any = self._host() if case.is_peer else None
        for rank in range(case.workers):
            self._start(rank)

    def whole(self) -> Run:
        """Disturb the run for its time, let it end, and add up what the workers did."""
        case, random_ranks = self._case, random.Random(self._case.seed)
        self._await(lambda: all(self._says(rank, "end") for rank in self._running), "start")
        begin = time.monotonic()
        due, next_kill = list[tuple[float, int]](), begin + case.every
        while (now := time.monotonic()) < begin + case.seconds and not self.run.fault:
            if now >= next_kill and self._running:
                rank = random_ranks.choice(sorted(self._running))
                self._end(rank, is_killed=True)
                due.append((time.monotonic() + RESTART, rank))
                next_kill += case.every
            for again in [each for each in due if each[0] <= now]:
                due.remove(again)
                self._start(again[1])
            self._note_ended()
            time.sleep(0.02)
        end = time.monotonic()
        if not case.is_peer and not self.run.fault:
            for _, rank in due:
                self._start(rank)
            self._finish()
        for rank in [*self._running]:
            self._end(rank, is_killed=False)
        if self._lighthouse is not None:
            self._lighthouse[0].kill()
        lives = [Life.read(*each) for each in self._past]
        ends = [life for life in lives if life.digest is not None]
        if len({life.digest for life in ends}) > 1:
            self.run.fault += " models differ"
        for life in ends:
            self.run.heldout, self.run.steps = life.heldout, life.made
        for life in lives:
            life.death = min(life.death, end)
        self.run.score = score(lives, case.step, begin, end)
        return self.run

    def _host(self) -> tuple[Any, str]:
        from bench.elastic import peer  # only where torchft is installed

        here, there = self._context.Pipe()
        process = self._context.Process(target=peer.host, args=(there,), daemon=True)
        process.start()
        return process, here.recv()

    def _start(self, rank: int) -> None:
        case, path = self._case, self._folder / f"{self._started}.{rank}"
        if case.is_peer:
            from bench.elastic import peer

            target: Callable[..., None] = peer.work
            args: tuple[Any, ...] = self._lighthouse[1], rank, case.text, INTERVAL
        else:
            target, args = work, (f"127.0.0.1:{self._store.port}", case.workers, rank, case.text)
        process = self._context.Process(target=target, args=(*args, case.step, path), daemon=True)
        process.start()
        self._started += 1
        self._running[rank] = process, path

    def _end(self, rank: int, is_killed: bool) -> None:
        process, path = self._running.pop(rank)
        process.kill()
        self._past.append((path, rank, time.monotonic(), is_killed))
        process.join()
        self.run.kills += is_killed

    def _finish(self) -> None:
        """Let all come in, train on to a common last step, and end."""
        self._await(lambda: all(self._says(rank, "end") for rank in self._running), "join")
        if self.run.fault:
            return
        if self._case.steps is None:
            numbers = [_last_step(path) for _, path in self._running.values()]
            self._store.set("last", str(max(numbers) + MARGIN))
        self._await(lambda: all(self._says(rank, "out") for rank in self._running), "finish")

    def _says(self, rank: int, kind: str) -> bool:
        path = self._running[rank][1]
        return path.exists() and f'["{kind}"' in path.read_text("utf-8")

    def _await(self, is_done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + HANG + 10 * self._case.step
        while not is_done() and not self.run.fault:
            time.sleep(0.05)
            self._note_ended()
            if time.monotonic() > until:
                self.run.fault = f"hangs: {what}"

    def _note_ended(self) -> None:
        """Note workers that have ended by themselves with an error."""
        for rank, (process, _) in self._running.items():
            if process.exitcode not in (None, 0):
                self.run.fault = f"rank {rank} ended with {process.exitcode}"


def _last_step(path: Path) -> int:
    ends = [line for line in path.read_text("utf-8").splitlines() if line.startswith('["end"')]
    return int(ends[-1].split(",")[2].rstrip("]"))


def disturb(context: BaseContext, case: Case) -> Run:
    """Make one run."""
    with tempfile.TemporaryDirectory() as name:
        return Killer(context, case, Path(name)).whole()
