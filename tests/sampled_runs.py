"""Runs without models: ranks that draw batches, commit steps, are lost, join, stop and resume."""

import io
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from offbeat.data import ElasticSampler


@dataclass
class Place:
    """The rank and the members, as :class:`offbeat.World` has them."""

    rank: int
    ranks: list[int]


@dataclass
class Member:
    """What a sampler reads of a replica."""

    world: Place
    steps: int = 0
    lost: list[dict[str, int]] = field(default_factory=list)
    joined: list[dict[str, int]] = field(default_factory=list)
    is_new: bool = False
    others: list[str] | None = None  # what the others pass to gather
    gathers: int = 0
    weighting: Any = field(
        default_factory=lambda: SimpleNamespace(now=1.0, follow=lambda pacer: None)
    )
    algorithm: Any = field(default_factory=lambda: SimpleNamespace(gradients=None))

    def stats(self) -> dict[str, Any]:
        """A test says how fast ranks are."""
        return {"last": {}}

    def register(self, name: str, stateful: Any, *, is_saved: bool) -> None:
        """A test loads what it has copied."""

    def gather(self, text: str) -> list[str]:
        self.gathers += 1
        return self.others or [text] * len(self.world.ranks)


class Worker:
    """A rank with a loader that holds up to ``ahead`` batches which have not been trained on."""

    def __init__(self, rank: int, ranks: Sequence[int], settings: dict[str, Any], ahead: int):
        self.replica = Member(Place(rank, list(ranks)))
        self.settings, self.ahead = settings, ahead
        self.trained: list[tuple[int, list[int]]] = []  # step, samples
        self.queue: list[tuple[list[int], Any]] = []
        self.state: Any = None  # when the last batch was drawn
        self.is_resting = False

    def attach(self) -> None:
        self.sampler = ElasticSampler(replica=self.replica, **self.settings)

    def restart(self) -> None:
        """As ``for batch in loader`` begins."""
        self.draws: Iterator[list[int]] = iter(self.sampler)
        self.queue = []
        self._fill(self.ahead)

    def _fill(self, size: int) -> None:
        while len(self.queue) < size and (batch := next(self.draws, None)) is not None:
            self.queue.append((batch, self.sampler.state_dict()))

    def step(self) -> list[list[int]]:
        """Get the batches of a step from the loader, which draws one for each."""
        found: list[list[int]] = []
        if self.is_resting:
            return found
        for _ in range(self.settings.get("accumulate", 1)):
            self._fill(self.ahead + 1)
            if self.queue:
                batch, self.state = self.queue.pop(0)
                found.append(batch)
        return found

    def commit(self, batches: list[list[int]]) -> None:
        self.trained += [(self.replica.steps, batch) for batch in batches]
        self.replica.steps += 1


class Run:
    """A run of several epochs; ``count``: by sample, how often it was trained on and counts.

    Ranks exchange every ``window`` steps. What a lost rank did since the last exchange is lost.
    """

    def __init__(self, draw: random.Random, length: int, drop_last: bool, window: int) -> None:
        self.draw, self.length, self.drop_last, self.window = draw, length, drop_last, window
        self.count, self.events = Counter[int](), Counter[str]()
        self.steps = self.committed = self.largest = 0
        self.begin(draw.randint(1, 5))

    def begin(self, size: int, state: Any = None) -> None:
        """Start ``size`` processes, at first or from a state."""
        accumulate, self.ahead = self.draw.randint(1, 2), self.draw.randint(0, 4)
        self.settings = {"length": self.length, "batch_size": self.draw.randint(1, 4)}
        self.settings |= {"accumulate": accumulate, "prefetch": self.ahead}
        self.settings |= {"drop_last": self.drop_last, "seed": 3}
        self.settings["most"] = self.draw.choice((None, 2 * self.settings["batch_size"]))
        if self.settings["most"] is None and self.draw.random() < 0.5:
            self.settings["window"] = self.draw.choice((3, 8))
        self.workers, self.newest = {}, size
        self.gone = list[int]()
        self.silent = set[int]()  # dead, and nobody knows it yet
        self.deferred: list[tuple[Worker, dict[str, int]]] = []  # who hears of what a step later
        for rank in range(size):
            self.workers[rank] = worker = self.worker(rank, range(size))
            worker.attach()
            worker.replica.steps = self.steps
            if state is not None:
                worker.sampler.load_state_dict(pickled(state))

    def worker(self, rank: int, ranks: Sequence[int]) -> Worker:
        """Return one with a loader as deep as allowed or less."""
        ahead = self.ahead if rank % 2 else self.draw.randint(0, self.ahead)
        return Worker(rank, ranks, self.settings, ahead)

    def train(self, epochs: int) -> None:
        """Train; all ranks end their epochs at the same step."""
        for epoch in range(epochs):
            self.tell_speeds()
            for worker in self.workers.values():
                worker.sampler.set_epoch(epoch)
            self.train_pass(epoch)
        self.finish()
        while self.same([w.sampler.begin_rest() for w in self.workers.values()]):
            self.events["rest"] += 1
            self.train_pass(epochs - 1)
            self.finish()
        for worker in self.workers.values():
            self.add(worker)

    def train_pass(self, epoch: int) -> None:
        """Train until the loaders end."""
        self.restart()
        while self.step():
            chance = self.draw.random()
            if chance < 0.03:
                self.resume(epoch)
            elif chance < 0.06:
                self.restart()
                self.events["restart"] += 1
            elif chance < 0.12 and self.settings["most"] and not self.silent and not self.deferred:
                self.tell_speeds()
                self.same([worker.sampler.balance() for worker in self.workers.values()])
                self.events["balanced"] += 1

    def tell_speeds(self) -> None:
        """Let all ranks hear the same times for one sample, 0 for one that is not known."""
        if self.settings["most"] or self.settings.get(
            "window"
        ):  # they gather: a loss is found, and all hear of it
            self.hear()
            self.lose(self.committed, self.steps)
        times = {rank: self.draw.choice((0.0, 0.5, 1, 2, 3)) for rank in self.workers}
        for worker in self.workers.values():
            ranks = worker.replica.world.ranks
            worker.replica.others = [json.dumps([rank, times.get(rank, 1)]) for rank in ranks]

    def restart(self) -> None:
        for worker in self.workers.values():
            worker.restart()

    def step(self) -> bool:
        """Make a step; False where the loaders have ended, of all ranks alike."""
        each = self.settings["most"] or self.settings["batch_size"]
        step = each * self.settings["accumulate"] * len(self.workers)
        self.largest = max(self.largest, step)
        living = {rank: w for rank, w in self.workers.items() if rank not in self.silent}
        found = {rank: worker.step() for rank, worker in living.items()}
        self.hear()
        sizes = [len(found[rank]) for rank, worker in living.items() if not worker.is_resting]
        size = self.same(sizes or [self.settings["accumulate"]])
        assert size in (0, self.settings["accumulate"])
        if size == 0:
            assert len(sizes) == len(living), "nobody rests after the end"
            return False
        self.events["rested"] += len(sizes) < len(living)
        if self.draw.random() < 0.08 and len(living) > 1:
            self.silent.add(self.draw.choice(sorted(living)))
        self.exchange(living, found, self.silent - set(living))
        if not self.silent and not self.deferred:
            if (chance := self.draw.random()) < 0.05:
                self.join()
            elif chance < 0.08 and len(self.workers) > 1:
                self.leave()
        self.rest()
        return True

    def rest(self) -> None:
        """Let all ask who rests in the next step."""
        if window := self.settings.get("window"):
            if self.steps % window == 0:
                self.tell_speeds()
            for worker in self.workers.values():
                worker.is_resting = worker.sampler.rests(self.steps)

    def exchange(
        self, living: dict[int, Worker], found: dict[int, Any], gone_before: set[int]
    ) -> None:
        """End the step: commit, with or without those that died in it."""
        is_due = (self.steps + 1) % self.window == 0
        with_dying = is_due and not gone_before and self.draw.random() < 0.5
        if is_due and not with_dying:
            self.lose(self.committed, self.steps)
        if is_due:
            self.committed = self.steps + 1
        if with_dying and self.silent:
            for rank in self.silent:
                self.workers[rank].commit(found[rank])
            self.lose(self.committed, self.steps + self.draw.randint(0, 1), late=0.5)
            self.events["lost after its commit"] += 1
        for rank in set(living) & set(self.workers) - self.silent:
            self.workers[rank].commit(found[rank])
        self.steps += 1

    def lose(self, used: int, step: int, late: float = 0.0) -> None:
        """Let the others agree on a loss; some that are ahead may hear of it in their next step."""
        for rank in sorted(self.silent):
            dead = self.workers.pop(rank)
            dead.trained = [(when, batch) for when, batch in dead.trained if when < used]
            self.add(dead)
            self.gone.append(rank)
            entry = {"rank": rank, "step": step, "used": used}
            self.deferred += [(worker, entry) for worker in self.workers.values()]
            self.events["lost"] += 1
        self.silent.clear()
        self.hear(late if step > self.steps else 0.0)

    def hear(self, late: float = 0.0) -> None:
        later = []
        for worker, entry in self.deferred:
            if self.draw.random() < late:
                later.append((worker, entry))
                self.events["heard a step later"] += 1
            else:
                worker.replica.lost.append(dict(entry))
                worker.replica.world.ranks.remove(entry["rank"])
        self.deferred = later

    def finish(self) -> None:
        """As ``replica.finish()``: an exchange of all."""
        self.hear()
        self.lose(self.committed, self.steps)
        self.committed = self.steps

    def leave(self) -> None:
        """Let a rank leave after a step, with all that it did handed over."""
        self.silent.add(self.draw.choice(sorted(self.workers)))
        self.lose(self.steps, self.steps)
        self.events["left"] += 1

    def join(self) -> None:
        """Let a rank in after a step: it gets its state from one that takes part."""
        rank, donor = self.newest, next(iter(self.workers.values()))
        free = [rank for rank in self.gone if rank not in self.workers]
        if free and self.draw.random() < 0.5:  # restarted, under its old number
            rank = self.draw.choice(free)
            self.events["joined again"] += 1
        self.newest += rank == self.newest
        entry = {"rank": rank, "step": self.steps - 1, "again": self.gone.count(rank)}
        for worker in self.workers.values():
            worker.replica.joined.append(dict(entry))
            worker.replica.world.ranks.append(rank)
        new = self.worker(rank, donor.replica.world.ranks)
        new.replica.lost, new.replica.joined = pickled([donor.replica.lost, donor.replica.joined])
        new.replica.steps, new.replica.is_new = self.steps, True
        new.attach()
        new.sampler.load_state_dict(pickled(donor.sampler.state_dict()))
        new.restart()
        self.workers[rank] = new
        self.events["joined"] += 1

    def resume(self, epoch: int) -> None:
        """Stop and start again with other numbers of ranks, batches and batches ahead."""
        self.finish()
        saver = self.draw.choice(list(self.workers.values()))
        # A loader keeps the state that the sampler had when it drew the batch of this step.
        kept = saver.state if self.draw.random() < 0.5 else None
        state = pickled(kept or saver.sampler.state_dict())
        for worker in self.workers.values():
            self.add(worker)
        most = 5 if self.length >= 40 else 2
        self.begin(self.draw.randint(1, most), state)
        for worker in self.workers.values():
            worker.sampler.set_epoch(epoch)
        self.restart()
        self.events["resumed"] += 1

    def add(self, worker: Worker) -> None:
        self.count.update(sample for _, batch in worker.trained for sample in batch)

    def same(self, values: list[Any]) -> Any:
        assert all(value == values[0] for value in values), values
        return values[0]


def pickled(state: Any) -> Any:
    """What a file keeps of it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
