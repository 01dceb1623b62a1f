"""Real processes over real sockets: what threads cannot show."""

import json
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import offbeat
from offbeat.platform.process_group import default_store
from problems import Quadratic, loss
from ranks import Spawned, torchrun, torchrun_forked

pytestmark = pytest.mark.processes

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist, offbeat
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
replica = offbeat.replicate(model, offbeat.algorithm(sys.argv[1]))
losses = []
for step in range(40):
    x = torch.randn(32, 5)
    loss = (model(x).squeeze() - x.sum(1)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad(); scheduler.step()
    replica.step()
    losses.append(loss.item())
replica.finish()
distance = replica.consensus_distance()
if dist.get_rank() == 0:
    print(json.dumps({"losses": losses, "distance": distance, **replica.stats()}))
replica.detach()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (2, "ddp(wire='bf16')"),
        (3, "sgp(within='local')"),
        (4, "sgp('ring')"),
        (4, "ddp for 9 steps, then local_sgd(4)"),
        (3, "ad_psgd"),
    ],
)
def test_a_script_trains_under_torchrun(workers: int, text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = torchrun_forked(workers, script, text, logs=tmp_path / "logs")
    result = json.loads(output.strip().splitlines()[-1])
    assert result["step"] == 40
    assert result["distance"] == {"mean": 0.0, "max": 0.0}
    assert result["total"]["bytes_sent"] > 0
    assert sum(result["losses"][-5:]) < 0.5 * sum(result["losses"][:5])


@pytest.mark.fault(
    "a script ends without detach() while messages are in flight",
    "all processes end",
    group="Leaving",
)
def test_a_script_that_never_detaches_ends(tmp_path: Path) -> None:
    """The thread of ad_psgd waits for messages when the interpreter goes down.

    So these are interpreters of their own, started by the command torchrun itself.
    """
    script = tmp_path / "train.py"
    # In one piece: the other's line could lie between a text and the end of its line.
    said = 'dist.barrier()\nprint(f"{losses}\\n", end="")\n'
    script.write_text(SCRIPT.split("replica.finish()")[0] + said)
    found = [json.loads(line) for line in torchrun(2, script, "ad_psgd").splitlines()]
    assert len(found) == 2
    assert all(sum(losses[-5:]) < 0.5 * sum(losses[:5]) for losses in found)


def _train_until_killed(rank: int, results: Any, text: str, victim: int, at: int) -> None:
    os.environ["GROUP_RANK"] = str(rank // 2)  # nodes, where nodes matter: (0, 1), (2, 3), (4,)
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=0.01)
    replica = offbeat.replicate(model, offbeat.algorithm(text))
    error = "trained to the end"
    try:
        for step in range(9000):
            if (rank, step) == (victim, at):
                os.kill(os.getpid(), signal.SIGKILL)
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            # No step of ad_psgd waits: this many must last until the heartbeats are missed.
            time.sleep(0.006 if text == "ad_psgd" else 0.0)
    except offbeat.PeerLost as lost:
        error = str(lost)
    results.put((rank, error, time.time()))
    # A survivor that lives on must not be what ends the others' waits.
    time.sleep(1)
    os._exit(0)


@pytest.mark.parametrize("text", ["ddp", "sgp", "ad_psgd", "daso"])
@pytest.mark.fault(
    "a rank is killed during training",
    "PeerLost on every other rank within seconds; names the rank",
)
def test_a_killed_rank_is_named_by_every_survivor(text: str, draws: random.Random) -> None:
    victim, at = draws.randrange(5), draws.randrange(20)
    print(f"{text}: rank {victim} dies at step {at}")
    world = Spawned(_train_until_killed, 5, text, victim, at)
    world.processes[victim].join(60)
    died = time.time()
    said = world.join(timeout=60)
    assert sorted(rank for rank, _, _ in said) == [rank for rank in range(5) if rank != victim]
    for rank, error, when in said:
        assert f"rank {victim} is lost" in error, f"rank {rank} said: {error}"
        assert when - died < 15


def _train_until_interrupted(rank: int, results: Any, text: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background
    model, store = Quadratic(), default_store()
    replica = offbeat.replicate(model, offbeat.algorithm(text))
    said, interrupt = "trained to the end", Timer(4, os.kill, (os.getpid(), signal.SIGINT))
    try:
        loss(model, rank, 0).backward()
        replica.step()
        if rank == 0:
            store.wait(["interrupted"], timedelta(seconds=25))
        if rank == 1:
            interrupt.start()
        loss(model, rank, 1).backward()
        replica.step()
    except (offbeat.PeerLost, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    store.set("interrupted", "")
    results.put((rank, said))
    replica.detach()


@pytest.mark.parametrize("text", ["ddp", "sgp('complete')"])
@pytest.mark.fault(
    "Ctrl-C on a rank that waits for another one",
    "KeyboardInterrupt within seconds; PeerLost on the others",
)
def test_ctrl_c_ends_a_wait(text: str) -> None:
    """In backward or in step(), for a rank that is elsewhere until the interrupt was heard."""
    said = dict(Spawned(_train_until_interrupted, 3, text).join(timeout=60))
    assert said[1] == "KeyboardInterrupt: "
    for rank in (0, 2):
        assert "PeerLost: rank 1 was interrupted in" in said[rank]


def _save_and_resume(rank: int, results: Any, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))

    def fresh() -> tuple[Quadratic, SGD, offbeat.Replica]:
        model = Quadratic()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, offbeat.replicate(model, offbeat.sgp(), mesh=mesh)

    def train(model: Quadratic, optimizer: SGD, replica: offbeat.Replica) -> None:
        for step in range(3):
            loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()

    model, optimizer, replica = fresh()
    train(model, optimizer, replica)
    # Momentum differs per rank: it goes under the rank's key, like the replica's state.
    momentum = {f"rank{rank}": optimizer.state_dict()["state"]}
    dcp.save({"replica": replica, "momentum": momentum}, checkpoint_id=folder)
    train(model, optimizer, replica)
    replica.detach()

    again, optimizer, resumed = fresh()
    train(again, optimizer, resumed)  # so that there is state to load into; then lost
    template = {f"rank{rank}": optimizer.state_dict()["state"]}
    dcp.load({"replica": resumed, "momentum": template}, checkpoint_id=folder)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": template[f"rank{rank}"]})
    train(again, optimizer, resumed)
    equal = all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    resumed.detach()
    results.put((rank, equal, resumed.steps))


def test_resumes_bit_equal_through_distributed_checkpoint(tmp_path: Path) -> None:
    said = Spawned(_save_and_resume, 2, str(tmp_path / "checkpoint")).join(timeout=60)
    assert sorted(said) == [(0, True, 6), (1, True, 6)]
