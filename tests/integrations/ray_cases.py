"""The example, and a run in which a worker is killed: prints a JSON line on what became of it.

Usage: python ray_cases.py FOLDER
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import ray.train
import ray.train.torch
import torch
from torch import Tensor, nn

import offbeat
from offbeat.integrations.ray import report, resume

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
STEPS, EVERY, KILLED_AT = 13, 4, 10  # checkpoints after 4, 8 and 12 steps


class Run:
    """A small model in training: the data of a step depend on the step and the rank alone."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank = ray.train.get_context().get_world_rank()
        bare = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.model = ray.train.torch.prepare_model(bare, parallel_strategy=None)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        replica = offbeat.replicate(self.model, offbeat.sgp(overlap=1))
        self.replica, self.optimizer, self.schedule = replica, optimizer, schedule
        # Its ranks are equal, so that a rank saves no model of its own.
        self.critic = offbeat.replicate(nn.Linear(4, 1), offbeat.ddp())
        self.judge = torch.optim.SGD(self.critic.model.parameters(), lr=0.05)
        self.parts = {"replica": replica, "optimizer": optimizer, "schedule": schedule}
        self.parts |= {"critic": self.critic, "judge": self.judge}

    def step(self) -> None:
        random = torch.Generator().manual_seed(1000 * self.rank + self.replica.steps)
        data = torch.rand(8, 4, generator=random)
        for replica, optimizer in ((self.replica, self.optimizer), (self.critic, self.judge)):
            replica.model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        self.schedule.step()

    def state(self) -> list[Tensor]:
        """All that this rank has of its own: parameters, buffers and the optimizer's moments."""
        moments = self.optimizer.state_dict()["state"].values()
        own = [*self.model.state_dict().values(), *(t for m in moments for t in m.values())]
        own += self.critic.model.state_dict().values()
        return [tensor.clone() for tensor in own]


def train(folder: Path) -> None:
    """Train, on the first attempt until a worker is killed; then without interruption."""
    torch.set_num_threads(1)
    run = Run()
    found = resume(**run.parts)
    resumed = {"found": found, "steps": run.replica.steps, "state": run.state()}
    while run.replica.steps < STEPS:
        if not found and run.replica.steps == KILLED_AT and run.rank == 1:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has registered them
            os.kill(os.getpid(), signal.SIGKILL)
        run.step()
        if run.replica.steps % EVERY == 0:
            report({"steps": run.replica.steps}, **run.parts)
    interrupted = run.state()
    run.replica.finish()
    finished = run.state()
    run.replica.detach()
    run.critic.detach()

    run = Run()
    seen, average = {}, []
    while run.replica.steps < STEPS:
        run.step()
        seen[run.replica.steps] = run.state()
        if run.replica.steps == resumed["steps"]:
            with run.replica.consensus():
                average = run.state()
    run.replica.finish()
    torch.save(
        {
            "resumed": resumed,
            "interrupted": interrupted,
            "finished": finished,
            "seen": seen,
            "average": average,
            "finished without": run.state(),
            "kept": kept(),
        },
        folder / f"rank{run.rank}.pt",
    )
    run.replica.detach()
    run.critic.detach()


def kept() -> dict[int, Any]:
    """The metrics and files of the checkpoints that Ray has kept, and their models, by step."""
    found = {}
    for each in ray.train.get_all_reported_checkpoints():
        with each.checkpoint.as_directory() as path:
            about = {"files": sorted(os.listdir(path)), "model": torch.load(f"{path}/model.pt")}
            found[each.metrics["steps"]] = {"metrics": each.metrics, **about}
    return found


class KilledBefore(ray.train.torch.TorchTrainer):
    """Its workers first train the run that is killed: to start others for it takes half a minute.

    So the settings of the example let the run survive.
    """

    def __init__(self, example: Callable[[Any], None], **settings: Any) -> None:
        def both(config: dict[str, Any]) -> None:
            train(Path(config["storage"]).parent)
            # The example trains from the start, without the checkpoints of the other run.
            with patch.object(ray.train, "get_checkpoint", return_value=None):
                example(config)

        super().__init__(both, **settings)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def example(folder: Path) -> None:
    """Run the example, which starts Ray and prints a line of its own."""
    words = [f"--storage={folder / 'runs'}", "--steps=40", "--report-every=20"]
    with (
        patch.object(sys, "argv", [str(EXAMPLE), *words]),
        patch.object(ray, "init", partial(ray.init, include_dashboard=False)),
        patch.object(ray.train.torch, "TorchTrainer", KilledBefore),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def facts(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the test asserts."""
    reports, first = ranks[0]["kept"], ranks[0]["resumed"]["steps"]
    average = reports[first]["model"]
    return {
        "found": [rank["resumed"]["found"] for rank in ranks],
        "resumed from": [rank["resumed"]["steps"] for rank in ranks],
        "own parts": [same(rank["resumed"]["state"], rank["seen"][first]) for rank in ranks],
        "ranks differed": not same(*(rank["seen"][first] for rank in ranks)),
        "as uninterrupted": [same(rank["interrupted"], rank["seen"][STEPS]) for rank in ranks],
        "as uninterrupted at the end": [
            same(rank["finished"], rank["finished without"]) for rank in ranks
        ],
        "reports": sorted(reports),
        "files": reports[first]["files"],
        "average": [same([*average.values()], rank["average"][: len(average)]) for rank in ranks],
        "metrics": reports[max(reports)]["metrics"],
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    example(place)
    ray.shutdown()
    print(json.dumps(facts([torch.load(place / f"rank{rank}.pt") for rank in (0, 1)])))
