"""The example, and a run in which a worker is killed: prints a JSON line on what became of it.

Usage: python ray_cases.py FOLDER
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
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
        self.parts = {"replica": replica, "optimizer": optimizer, "schedule": schedule}

    def step(self) -> None:
        random = torch.Generator().manual_seed(1000 * self.rank + self.replica.steps)
        self.model(torch.rand(8, 4, generator=random)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.replica.step()

    def state(self) -> list[Tensor]:
        """All that this rank has of its own: parameters, buffers and the optimizer's moments."""
        moments = self.optimizer.state_dict()["state"].values()
        own = [*self.model.state_dict().values(), *(t for m in moments for t in m.values())]
        return [tensor.clone() for tensor in own]


def train(config: dict[str, str]) -> None:
    """Train, on the first attempt until a worker is killed; then without interruption."""
    torch.set_num_threads(1)
    folder, run = Path(config["folder"]), Run()
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
        },
        folder / f"rank{run.rank}.pt",
    )
    run.replica.detach()


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def example(folder: Path) -> None:
    """Run the example, which starts Ray and prints a line of its own."""
    words = [f"--storage={folder / 'runs'}", "--steps=40", "--report-every=20"]
    with patch.object(sys, "argv", [str(EXAMPLE), *words]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def fit(folder: Path) -> ray.train.Result:
    """Train with two workers, one of which is killed in the first attempt."""
    failures = FailureConfig(max_failures=1)
    return ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "runs"), failure_config=failures),
    ).fit()


def facts(result: ray.train.Result, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the test asserts."""
    reports = {metrics["steps"]: Path(kept.path) for kept, metrics in result.best_checkpoints}
    first = ranks[0]["resumed"]["steps"]
    average = torch.load(reports[first] / "model.pt")
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
        "files": sorted(path.name for path in reports[first].iterdir()),
        "average": [same([*average.values()], rank["average"][: len(average)]) for rank in ranks],
        "metrics": result.metrics,
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    example(place)
    end = fit(place)
    ray.shutdown()
    print(json.dumps(facts(end, [torch.load(place / f"rank{rank}.pt") for rank in (0, 1)])))
