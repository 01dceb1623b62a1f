"""A worker of :mod:`bench.scale.churn`: trains, and may be killed at any time."""

import json
import os
import random
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from statistics import median

import torch
from torch.distributed import TCPStore

import offbeat
from offbeat.liveness.heartbeats import heartbeat

PATIENCE = {"BEAT": 0.3, "BROKEN_AFTER": 2.0, "SILENT_AFTER": 5.0}  # seconds, a third of the usual
STEP = 0.02  # seconds that a step takes at least, on average
AROUND = 5  # steps before and after an admission that count as its own
FEATURES = 20
GIVEN_UP = 3  # exit code of a worker that the others have given up, because it was too slow


def work(
    port: int, size: int, rank: int | None, seed: int, text: str, ranks_per_node: int = 1
) -> None:
    """Train as one worker, and end as one does under a launcher that starts it again."""
    torch.set_num_threads(1)
    for name, value in PATIENCE.items():
        setattr(heartbeat, name, value)
    warnings.simplefilter("ignore")
    try:
        address, draws = f"127.0.0.1:{port}", random.Random(f"{seed} {rank} {time.time()}")
        world = offbeat.World.at(address, size=size, rank=rank, ranks_per_node=ranks_per_node)
        _train(TCPStore("127.0.0.1", port, is_master=False), world, text, draws)
    except offbeat.PeerLost as loss:
        if "given up by the others" in str(loss):
            os._exit(GIVEN_UP)
        raise


def _train(store: TCPStore, world: offbeat.World, text: str, draws: random.Random) -> None:
    """Say when this worker is in, and at the end what it has seen."""

    def say(*word: object) -> None:
        """By the store: a queue would keep the lock of a worker that is killed."""
        store.append("words", json.dumps(word) + "\n")

    torch.manual_seed(draws.randrange(2**31))
    model = torch.nn.Linear(FEATURES, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _optimize(model, optimizer)  # the first time imports for a second, which others would wait for
    replica = offbeat.replicate(
        model, offbeat.algorithm(text), mesh=world, optimizer=optimizer, elastic=True
    )
    say("in", replica.world.rank, os.getpid())
    losses, last, seconds, lost_in = [], None, dict[int, float](), set[int]()
    while last is None or replica.steps < last:
        time.sleep(draws.expovariate(1 / STEP) if draws.random() < 0.1 else STEP)
        losses.append(_optimize(model, optimizer))
        timed_step(replica, seconds, lost_in)
        if last is None:
            store.set("step", str(replica.steps))
            last = int(store.get("last")) if store.check(["last"]) else None
    replica.finish()
    end = next(model.parameters()).detach().flatten().tolist()
    stalled = [*stalls(seconds, lost_in, (join["step"] for join in replica.joined)).items()]
    say("out", replica.world.rank, end, replica.stats(), losses, stalled, median(seconds.values()))
    replica.detach()


def _optimize(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(64, FEATURES)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def timed_step(replica: offbeat.Replica, seconds: dict[int, float], lost_in: set[int]) -> None:
    """Take the time of ``step()``, and note whether it has noticed a loss."""
    step, lost, began = replica.steps, len(replica.lost), time.perf_counter()
    replica.step()
    seconds[step] = time.perf_counter() - began
    if len(replica.lost) > lost:
        lost_in.add(step)


def stalls(
    seconds: Mapping[int, float], lost_in: Collection[int], admissions: Iterable[int]
) -> dict[int, float]:
    """The longest ``step()`` around each admission, by its step; ``seconds`` are those of all.

    Without admissions before this rank came, and those around which a rank was lost: such a call
    has waited for the lost rank until its silence was long enough.
    """
    around = {step: range(step - AROUND, step + AROUND + 1) for step in admissions}
    return {
        step: max(seconds[each] for each in near if each in seconds)
        for step, near in around.items()
        if step in seconds and not any(each in lost_in for each in near)
    }
