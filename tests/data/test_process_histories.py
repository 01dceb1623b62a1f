"""Random histories in real processes: some are killed, leave or join, and all stop and resume."""

import json
import os
import random
import signal
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import offbeat
from offbeat.data import ElasticSampler
from offbeat.liveness.heartbeats import heartbeat
from ranks import fork_server

LENGTH, BATCH, AHEAD, WINDOW, EPOCHS = 360, 3, 2, 4, 2
RECIPES = (("ddp", None), ("local_sgd(every=4)", None), ("local_sgd(every=4)", WINDOW))
PATIENCE = {"BEAT": 0.3, "BROKEN_AFTER": 2.0, "SILENT_AFTER": 5.0}  # seconds, a third of the usual
Event = dict[str, int]  # "die" or "leave": in which step


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
    port: int, size: int, rank: int | None, folder: str, given: Any, events: Event, stop: int
) -> None:
    """Train until step ``stop`` and save, or to the end; note each batch before it counts."""
    torch.set_num_threads(1)
    for name, value in PATIENCE.items():
        setattr(heartbeat, name, value)
    warnings.simplefilter("ignore")
    text, window, saved = given
    world = offbeat.World.at(f"127.0.0.1:{port}", size=size, rank=rank)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kinds: Any = {"elastic": True, "weighted": window is not None}
    replica = offbeat.replicate(model, offbeat.algorithm(text), mesh=world, **kinds)
    sampler = ElasticSampler(LENGTH, BATCH, replica, prefetch=AHEAD, window=window)
    if saved and rank is not None:
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
            if replica.steps >= events.get("die", 1 << 30):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if replica.steps >= events.get("leave", 1 << 30) and not replica.has_left:
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


def launch(
    folder: Path, draws: random.Random, given: Any, since: int, stop: int
) -> list[dict[str, Any]]:
    """Run processes from a step on until all that live have ended; return what they say."""
    folder.mkdir()
    size = draws.randint(3, 4)
    events: list[Event] = [{} for _ in range(size)]
    for victim in draws.sample(range(1, size), draws.randint(1, 2)):
        step = draws.randint(1, stop - 1 if stop else 20)
        events[victim][draws.choice(["die", "die", "leave"])] = since + step
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(rank: int | None, event: Event) -> Any:
        arguments = (store.port, size, rank, str(folder), given, event, stop)
        process = fork_server().Process(target=work, args=arguments, daemon=True)
        process.start()
        return process

    members = [start(rank, event) for rank, event in enumerate(events)]
    time.sleep(draws.uniform(0.1, 0.5))
    newcomer = start(None, {})
    codes = []
    for process, event in zip(members, events, strict=True):
        process.join(40)
        codes.append((process.exitcode, event))
    newcomer.join(10 if [*folder.glob(f"notes{size}")] else 0)
    newcomer.kill()  # it may have come too late
    assert all(code == (-9 if "die" in event else 0) for code, event in codes), codes
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


@pytest.mark.processes
def test_each_sample_once_over_ten_histories(draws: random.Random, tmp_path: Path) -> None:
    seen = Counter[str]()
    for number in range(10):
        text, window = RECIPES[number % 3]
        first, second = tmp_path / f"{number}a", tmp_path / f"{number}b"
        stop = WINDOW * draws.randint(3, 6)
        ends = launch(first, draws, (text, window, None), 0, stop)
        count = used(first, ends)
        state: dict[str, Any] = {}
        for path in first.glob("state*"):
            state |= torch.load(path, weights_only=True)
        torch.save(state, first / "saved")
        later = launch(second, draws, (text, window, str(first / "saved")), stop, 0)
        fresh = [{**e, "lost": [x for x in e["lost"] if x["step"] >= stop]} for e in later]
        count += used(second, fresh)
        stats = later[0]["stats"]
        assert all(end["stats"] == stats for end in later)
        assert set(count) == {*range(LENGTH)}, (number, text, window)
        assert min(count.values()) == EPOCHS, (number, text, window)
        extra = sum(count.values()) - EPOCHS * LENGTH
        assert extra <= stats["repeated"], (number, text, window, extra, stats)
        assert stats["left"] == 0
        for end in (ends[0], later[0]):
            seen.update(lost=len(end["lost"]), joined=len(end["joined"]))
    assert seen["lost"] >= 10, seen
    assert seen["joined"] > 3, seen
