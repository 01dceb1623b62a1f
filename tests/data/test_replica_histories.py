"""Random histories of replicas, in worlds of threads and in processes.

Some ranks are lost, leave or join; then all stop, and others in number resume.
"""

import json
import os
import random
import signal
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import offbeat
from crowd import Crowd
from offbeat.data import ElasticSampler
from offbeat.elastic import join
from offbeat.liveness.heartbeats import heartbeat
from offbeat.transport.world import World
from ranks import fork_server

LENGTH, BATCH, AHEAD, WINDOW, EPOCHS = 360, 3, 2, 4, 2
RECIPES: tuple[tuple[str, int | None], ...] = (
    ("ddp", None),
    ("local_sgd(every=4)", None),
    ("local_sgd(every=4)", WINDOW),
)
PATIENCE = {"BEAT": 0.3, "BROKEN_AFTER": 2.0, "SILENT_AFTER": 5.0}  # seconds, a third of the usual
Event = dict[str, int]  # "die" or "leave": in which step
Settings = tuple[str, int | None, Path | None]  # recipe, window, and the state to begin with
Events = list[Event]


def ahead(batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """Draw as a loader with workers does."""
    drawn, left = deque[list[int]](), iter(batches)
    while True:
        while len(drawn) <= AHEAD and (batch := next(left, None)) is not None:
            drawn.append(batch)
        if not drawn:
            return
        yield drawn.popleft()


def work(
    world: World, die: Callable[[offbeat.Replica], Any], event: Event, stop: int, folder: Path,
    settings: Settings,
) -> None:  # fmt: skip
    """Train until step ``stop`` and save, or to the end; note each batch before it counts."""
    text, window, saved = settings
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kinds: Any = {"elastic": True, "weighted": window is not None, "mesh": world}
    replica = offbeat.replicate(model, offbeat.algorithm(text), **kinds)
    sampler = ElasticSampler(LENGTH, BATCH, replica, prefetch=AHEAD, window=window)
    if saved is not None and not replica.joined:
        replica.load_state_dict(torch.load(saved, weights_only=True))
    me, begun = replica.world.rank, sampler.stats()["epoch"]

    def train(notes: Any) -> bool:
        if replica.steps == stop:  # it has joined in the last step
            return False
        for batch in ahead(sampler):
            time.sleep(0.02 if me == 1 else 0.008)
            model(torch.ones(1, 1)).sum().backward()
            notes.write(json.dumps([replica.steps, batch]) + "\n")
            notes.flush()
            if replica.steps >= event.get("die", 1 << 30):
                die(replica)
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if replica.steps >= event.get("leave", 1 << 30) and not replica.has_left:
                replica.leave()
            if replica.has_left or replica.steps == stop:
                return False
        return True

    with Path(folder, f"notes{me}").open("w") as notes:
        is_over = True
        for epoch in range(begun, EPOCHS):
            sampler.set_epoch(epoch)
            if not (is_over := train(notes)):
                break
        if replica.has_left:
            return
        replica.finish()
        while is_over and sampler.begin_rest():
            train(notes)
            replica.finish()
    if not is_over:
        torch.save(replica.state_dict(), Path(folder, f"state{me}"))
    told = {"lost": replica.lost, "joined": replica.joined, "stats": sampler.stats()}
    Path(folder, f"end{me}").write_text(json.dumps(told))
    replica.detach()


class Dead(Exception):
    """Ends a thread that is a lost rank."""


def in_threads(events: Events, delay: float, *rest: Any) -> None:
    """Run a part of a history until all that live have ended."""

    def die(replica: offbeat.Replica) -> None:
        links = replica._connection.links
        assert links is not None
        links.heartbeat._end_thread()
        raise Dead

    def member(world: World) -> None:
        with suppress(Dead):
            work(world, die, {} if world.is_new else events[world.rank], *rest)

    crowd = Crowd(len(events), member)
    crowd.come(crowd.world.newcomer(), after=delay)
    came = crowd.all()[-1]
    assert came is None or isinstance(came, offbeat.PeerLost), "it may have come too late"


def process(port: int, size: int, rank: int | None, event: Event, *rest: Any) -> None:
    torch.set_num_threads(1)
    for name, value in PATIENCE.items():
        setattr(heartbeat, name, value)
    warnings.simplefilter("ignore")
    world = World.at(f"127.0.0.1:{port}", size=size, rank=rank)
    work(world, lambda _: os.kill(os.getpid(), signal.SIGKILL), event, *rest)


def in_processes(events: Events, delay: float, *rest: Any) -> None:
    """Run a part of a history until all that live have ended."""
    size, folder = len(events), rest[1]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int | None, event: Event) -> Any:
        arguments = (store.port, size, rank, event, *rest)
        started = fork_server().Process(target=process, args=arguments, daemon=True)
        started.start()
        return started

    members = [start(rank, event) for rank, event in enumerate(events)]
    time.sleep(delay)
    newcomer = start(None, {})
    codes = []
    for member, event in zip(members, events, strict=True):
        member.join(40)
        codes.append((member.exitcode, event))
    newcomer.join(10 if [*folder.glob(f"notes{size}")] else 0)
    newcomer.kill()  # it may have come too late
    assert all(code == (-9 if "die" in event else 0) for code, event in codes), codes


Part = Callable[..., None]


def play(
    part: Part, draw: random.Random, size: int, folder: Path, since: int, stop: int, *given: Any
) -> list[dict[str, Any]]:
    """Play a history from a step on; return what those that have ended say."""
    folder.mkdir()
    events: Events = [{} for _ in range(size)]
    # Two at least go on: the state of a rank that is left alone holds no order of gradients.
    for victim in draw.sample(range(1, size), draw.randint(1, size - 2)):
        step = draw.randint(1, stop - 1 if stop else 20)
        events[victim][draw.choice(["die", "die", "leave"])] = since + step
    part(events, draw.uniform(0.1, 0.5), stop, folder, given)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("end*"))]


def used(folder: Path, ends: list[dict[str, Any]]) -> Counter[int]:
    """How often each sample was trained on and counts."""
    lost = {entry["rank"]: entry["used"] for entry in ends[0]["lost"]}
    count = Counter[int]()
    for path in folder.glob("notes*"):
        until = lost.get(int(path.name.removeprefix("notes")), 1 << 30)
        for step, batch in map(json.loads, path.read_text().splitlines()):
            count.update(batch if step < until else [])
    return count


def history(part: Part, folder: Path, number: int, seed: float) -> Counter[str]:
    """Play a history in two parts, of which the second resumes; return how often what happened."""
    (text, window), draw = RECIPES[number % 3], random.Random(seed)
    first, second = folder / f"{number}a", folder / f"{number}b"
    stop, sizes = WINDOW * draw.randint(3, 6), [draw.randint(3, 4) for _ in range(2)]
    ends = play(part, draw, sizes[0], first, 0, stop, text, window, None)
    count = used(first, ends)
    state: dict[str, Any] = {}
    for path in first.glob("state*"):
        state |= torch.load(path, weights_only=True)
    torch.save(state, first / "saved")
    later = play(part, draw, sizes[1], second, stop, 0, text, window, first / "saved")
    fresh = [{**end, "lost": [x for x in end["lost"] if x["step"] >= stop]} for end in later]
    count += used(second, fresh)
    stats = later[0]["stats"]
    assert all(end["stats"] == stats for end in later)
    assert set(count) == {*range(LENGTH)}, (number, text, window)
    assert min(count.values()) == EPOCHS, (number, text, window)
    extra = sum(count.values()) - EPOCHS * LENGTH
    assert extra <= stats["repeated"], (number, text, window, extra, stats)
    assert stats["left"] == 0
    seen = Counter[str](other_size=len(state) != sizes[1])
    for end in (ends[0], later[0]):
        seen.update(lost=len(end["lost"]), joined=len(end["joined"]))
    return seen


def histories(
    part: Part, many: int, at_once: int, draws: random.Random, folder: Path
) -> Counter[str]:
    """Play histories, some at the same time: each one waits for losses to be found."""
    seeds = [draws.random() for _ in range(many)]
    with ThreadPoolExecutor(at_once) as pool:
        found = [*pool.map(partial(history, part, folder), range(many), seeds)]
    return sum(found, Counter[str]())


@pytest.mark.processes
def test_each_sample_once_over_ten_histories(draws: random.Random, tmp_path: Path) -> None:
    seen = histories(in_processes, 10, 2, draws, tmp_path)
    assert seen["lost"] >= 10, seen
    assert seen["joined"] > 0, seen


@pytest.mark.quiet  # of twenty threads none may look lost for two seconds
@pytest.mark.usefixtures("impatient")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_sample_once_in_worlds_of_threads(
    draws: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "TIMEOUT", timedelta(seconds=2))
    seen = histories(in_threads, 12, 4, draws, tmp_path)
    assert seen["lost"] >= 12, seen
    assert seen["joined"] > 0, seen
    assert seen["other_size"] > 0, seen  # depends on who is lost in time
