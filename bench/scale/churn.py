"""An elastic run under random kills and joins: real processes around one TCPStore."""

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.context import BaseContext
from statistics import fmean
from typing import Any

from torch.distributed import TCPStore

from bench.scale.worker import GIVEN_UP, work

MARGIN = 100  # steps between the announcement of the last one and that one
POINTS = 10  # of the curve of the loss
HANG = 25.0  # seconds without an answer that count as one
WITNESS = 0  # a rank that is never killed: it has seen all who came and went


@dataclass
class Run:
    """What has happened in one run; who was lost and who joined, as the witness says."""

    seed: int  # of the times, victims and delays
    steps: int = 0
    killed: list[int] = field(default_factory=list)  # ranks in the order of their deaths
    returned: int = 0  # under their old number
    new: int = 0  # under a new one
    given_up: int = 0  # alive, but silent for so long that the others went on
    hung: list[str] = field(default_factory=list)  # what did not come; who ended by themselves
    lost: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    is_told: bool = False  # whether these list all losses and joins that the killer knows of
    is_agreed: bool = False  # whether all models were equal at the end
    losses: list[float] = field(default_factory=list)  # the witness's mean in each tenth of the run
    # Seconds of the longest step() around each admission, on the rank where it took longest of
    # those that took part and have lived to the end; the median seconds of a step() of the witness.
    stalls: list[float] = field(default_factory=list)
    step: float = 0.0


class Churn:
    """Starts the workers of a run, kills them at random, and starts others in their place."""

    def __init__(self, context: BaseContext, seed: int, size: int, text: str) -> None:
        self.run, self._draws, self._size, self._text = Run(seed), random.Random(seed), size, text
        self._context: Any = context
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store.set("words", "")
        self._heard = 0
        self._coming: list[Any] = []  # processes, and below by rank
        self._living: dict[int, Any] = {}
        self._ends: dict[int, list[Any]] = {}  # what the workers say at the end
        self._was_in: list[int] = []  # killed after they had come in
        self._came: list[int] = []
        for rank in range(size):
            self._start(rank)
        self._await(lambda: len(self._living) == size, "start")
        self._came.clear()

    def disturb(self, seconds: float) -> None:
        """Kill and start workers for some time."""
        until, draws = time.monotonic() + seconds, self._draws
        while (left := until - time.monotonic()) > 0 and not self.run.hung:
            self._hear(min(left, draws.uniform(0.02, 0.15) * seconds))
            victims = [*(r for r in self._living if r != WITNESS), *range(-len(self._coming), 0)]
            count = min(len(victims), draws.choice([1, 1, 1, 2]))
            for victim in draws.sample(victims, count):
                self._kill(victim)
            self._hear(min(max(0.0, until - time.monotonic()), draws.uniform(0.0, 3.0)))
            while len(self._living) + len(self._coming) < self._size:
                self._replace()

    def end(self) -> Run:
        """Let all come in, train on to a common last step, and compare what they say."""
        run = self.run
        self._await(lambda: not self._coming, "join")
        run.steps = int(self._store.get("step")) + MARGIN
        self._store.set("last", str(run.steps))
        self._await(lambda: len(self._ends) == len(self._living), "finish")
        for process in [*self._living.values(), *self._coming]:
            process.join(10)
            process.kill()
        if WITNESS in self._ends:
            models = [model for model, *_ in self._ends.values()]
            _, stats, losses, _, run.step = self._ends[WITNESS]
            run.is_agreed = all(model == models[0] for model in models)
            run.lost = [loss["rank"] for loss in stats["lost"]]
            run.joined = [join["rank"] for join in stats["joined"]]
            # One that was killed while it joined may be among them or not.
            run.is_told = has(run.lost, self._was_in) and has(run.joined, self._came)
            run.is_told &= {*range(self._size), *run.joined} >= {*self._ends} >= {WITNESS}
            tenth = max(1, len(losses) // POINTS)
            parts = (losses[i * tenth : (i + 1) * tenth] for i in range(POINTS))
            run.losses = [fmean(part or [0.0]) for part in parts]
            run.stalls = longest(stalls for *_, stalls, _ in self._ends.values())
        return run

    def _start(self, rank: int | None) -> None:
        args = self._store.port, self._size, rank, self.run.seed, self._text
        process = self._context.Process(target=work, args=args, daemon=True)
        process.start()
        process.rank = rank
        self._coming.append(process)

    def _kill(self, victim: int) -> None:
        """Kill a rank that takes part or, if negative, one that is about to."""
        if victim < 0:
            process = self._coming.pop(victim % (len(self._coming) or 1))
            number = -1 if process.rank is None else process.rank
        else:
            process, number = self._living.pop(victim), victim
            self._was_in.append(victim)
        process.kill()
        process.join()
        self.run.killed.append(number)

    def _replace(self) -> None:
        busy = {*self._living, *(process.rank for process in self._coming)}
        free = [rank for rank in range(self._size) if rank not in busy]
        if free and self._draws.random() < 0.7:
            self.run.returned += 1
            self._start(self._draws.choice(free))
        else:
            self.run.new += 1
            self._start(None)

    def _await(self, is_done: Callable[[], bool], what: str) -> None:
        since = time.monotonic()
        while not is_done() and not self.run.hung:
            self._hear(0.1)
            if time.monotonic() - since > HANG:
                coming = [process.rank for process in self._coming]
                self.run.hung.append(f"{what}: {coming} come, {[*self._living]} are in")

    def _hear(self, seconds: float) -> None:
        """Take in what the workers say, for so long."""
        until = time.monotonic() + seconds
        while True:
            words = self._store.get("words").decode().splitlines()
            for kind, rank, *said in map(json.loads, words[self._heard :]):
                if kind == "in":
                    self._welcome(rank, *said)
                else:
                    self._ends[rank] = said
            self._heard = len(words)
            self._note_ended()
            if time.monotonic() >= until:
                return
            time.sleep(0.05)

    def _welcome(self, rank: int, pid: int) -> None:
        process = next((p for p in self._coming if p.pid == pid), None)
        if process is not None:  # else it was killed meanwhile
            self._coming.remove(process)
            self._living[rank] = process
            self._came.append(rank)

    def _note_ended(self) -> None:
        """Count workers that have ended by themselves, before they were asked to."""
        for rank, process in [*self._living.items(), *((None, p) for p in self._coming)]:
            if process.exitcode == GIVEN_UP and rank != WITNESS and rank is not None:
                self.run.given_up += 1
                self._was_in.append(rank)
                del self._living[rank]
            elif process.exitcode not in (None, 0):
                self.run.hung.append(f"rank {rank} ended with {process.exitcode}")


def has(said: list[int], known: list[int]) -> bool:
    """Whether all of ``known``, each as often as it stands there, are in ``said``."""
    return all(said.count(rank) >= known.count(rank) for rank in known)


def longest(told: Iterable[list[tuple[int, float]]]) -> list[float]:
    """The longest of what the ranks say about each admission, in the order of their steps."""
    found = defaultdict[int, float](float)
    for step, seconds in chain.from_iterable(told):
        found[step] = max(seconds, found[step])
    return [found[step] for step in sorted(found)]


def churn(
    context: BaseContext, seed: int, seconds: float, size: int = 6, text: str = "sgp(overlap=1)"
) -> Run:
    whole = Churn(context, seed, size, text)
    whole.disturb(seconds)
    return whole.end()
