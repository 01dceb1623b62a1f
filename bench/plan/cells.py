"""Measured and predicted times of a step, for several methods on one layout and rate."""

import copy
import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from bench.harness.pause import Paused
from bench.harness.ranks import on_nodes
from bench.harness.step_times import Loss, task
from offbeat.lab import Lab
from offbeat.lab.check import PAYLOAD, LinkMeasurements, measure_links
from offbeat.plan import Fabric, Profile, Speeds, Stragglers, predict
from offbeat.plan.measure import profile_of
from offbeat.telemetry.gradient_times import GRADIENTS_VARIABLE
from offbeat.telemetry.recorder import FOLDER_VARIABLE
from offbeat.telemetry.recording import read_run

WIDTH, PAUSE = 224, 0.2  # of eight layers, 1.6 MB; seconds of a step
ALONE = 12  # steps of the profile


@dataclass(frozen=True)
class Layout:
    """Nodes, ranks on each of them, and by how much longer the first rank pauses.

    With ``computes`` a GPT of 13.0 MB is trained, else a model that pauses.
    """

    nodes: int
    each: int = 1
    slow: float = 1.0
    computes: bool = False

    def __str__(self) -> str:
        kind = f"{self.nodes}" if self.each == 1 else f"{self.nodes}x{self.each}"
        kind += ", computing" if self.computes else ""
        return kind if self.slow == 1 else f"{kind}, one {self.slow:g}x slower"


@dataclass(frozen=True)
class Method:
    """A recipe, the steps that count, a multiple of its period, and those before them."""

    text: str
    steps: int = 5
    warm_up: int = 2


@dataclass(frozen=True)
class Cell:
    """A step of one method: seconds measured, seconds predicted, and where these go."""

    method: str
    layout: str
    rate: str
    measured: float
    predicted: float
    limit: str

    @property
    def error(self) -> float:
        """The deviation of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1


def check(rate: str) -> LinkMeasurements:
    """Measure the links of the lab once, as ``offbeat lab --check`` does."""
    with Lab(2, 2, rate) as runner:
        return measure_links(runner)


def cells(
    methods: list[Method], layout: Layout, rate: str, links: LinkMeasurements, speeds: Speeds
) -> list[Cell]:
    """Measure all methods in one run, and predict them from the step of a rank alone."""
    profile, times = on_nodes(measure, (methods, layout), layout.nodes, layout.each, rate)
    fabric = Fabric(
        nodes=layout.nodes,
        ranks_per_node=layout.each,
        rate=1e6 * links.both_ways_mbit / PAYLOAD,
        latency=links.round_trip_ms / 2e3,
        inside_rate=1e6 * (links.inside_node_mbit or links.both_ways_mbit),
        inside_latency=links.round_trip_ms / 4e3,
    )
    profile = replace(profile, speeds=speeds)
    # Only the pause of the slow rank is longer, not what else its step takes.
    slower = 1 + (layout.slow - 1) * PAUSE / profile.compute
    stragglers, found = Stragglers(first_factor=slower), []
    for method, measured in zip(methods, times, strict=True):
        made = predict(offbeat.algorithm(method.text), profile, fabric, stragglers)
        limit = made.parts.limit
        found.append(Cell(method.text, str(layout), rate, measured, made.seconds, limit))
    return found


def measure(question: tuple[list[Method], Layout]) -> tuple[Profile, list[float]]:
    """The profile of rank 0 alone, and the seconds of a step of every method; on every rank."""
    methods, layout = question
    start, loss_of = task(None if layout.computes else (PAUSE, WIDTH))
    profile = alone(start, loss_of)
    if isinstance(start, Paused) and dist.get_rank() == 0:
        start.seconds *= layout.slow
    times = []
    for method in methods:
        seconds = torch.tensor([train(method, copy.deepcopy(start), loss_of)])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(seconds.item())
        if dist.get_rank() == 0:
            print(f"{method.text}: {times[-1]:.3f} s", flush=True)
    return profile, times


def alone(start: nn.Module, loss_of: Loss) -> Profile:
    """Record a rank that exchanges nothing, while the others do the same."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {FOLDER_VARIABLE: folder, GRADIENTS_VARIABLE: "1"}
        train(Method("alone", ALONE, 0), copy.deepcopy(start), loss_of)
        del os.environ[FOLDER_VARIABLE], os.environ[GRADIENTS_VARIABLE]
        profile = profile_of(read_run(Path(folder)), Speeds.of_bandwidth(1e10))
    return replace(profile, spread=())


def train(method: Method, model: nn.Module, loss_of: Loss) -> float:
    """Train; the mean seconds of a step after the warm-up, on this rank."""
    replica = offbeat.replicate(model, offbeat.algorithm(method.text))
    optimizer = torch.optim.SGD(replica.owned_parameters(), lr=1e-3)
    ends = [time.perf_counter()]
    for _ in range(method.warm_up + method.steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.step()
        ends.append(time.perf_counter())
    replica.finish()
    replica.detach()
    return (ends[-1] - ends[method.warm_up]) / method.steps


def dump(found: list[Cell], path: Path) -> None:
    """Write the cells so far: an interrupted run goes on from there."""
    path.write_text(json.dumps([vars(cell) for cell in found]), encoding="utf-8")


def load(path: Path) -> list[Cell]:
    """Read what :func:`dump` has written; nothing if there is no file."""
    return [Cell(**each) for each in json.loads(path.read_text("utf-8"))] if path.exists() else []
