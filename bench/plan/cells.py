"""Measured and predicted times of a step, for several methods on one layout and rate."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch.distributed as dist

import offbeat
from bench.harness.gpt import gpt
from bench.harness.pause import Paused, paused
from bench.harness.ranks import on_nodes
from bench.harness.step_times import StepTime, Timed, train, train_all
from offbeat.lab import Lab
from offbeat.lab.check import PAYLOAD, LinkMeasurements, measure_links
from offbeat.plan import Fabric, Profile, Speeds, Stragglers, predict
from offbeat.planner.measure import profile_of
from offbeat.telemetry.gradient_times import GRADIENTS_VARIABLE

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

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Of the number of nodes, or of nodes x ranks: "4", "2x2"."""
        nodes, _, each = text.partition("x")
        return cls(int(nodes), int(each or 1))

    def __str__(self) -> str:
        kind = f"{self.nodes}" if self.each == 1 else f"{self.nodes}x{self.each}"
        kind += ", computing" if self.computes else ""
        return kind if self.slow == 1 else f"{kind}, one {self.slow:g}x slower"


def case(text: str, steps: int = 5, warm_up: int = 2) -> Timed:
    """A recipe, the steps that count, a multiple of its period, and those before them."""
    return Timed(text, offbeat.algorithm(text), warm_up + steps, warm_up)


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
    methods: list[Timed], layout: Layout, rate: str, links: LinkMeasurements, speeds: Speeds
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
        made = predict(method.algorithm, profile, fabric, stragglers)
        limit = made.parts.limit
        found.append(Cell(method.name, str(layout), rate, measured.step, made.seconds, limit))
    return found


def measure(question: tuple[list[Timed], Layout]) -> tuple[Profile, list[StepTime]]:
    """The profile of rank 0 alone, and the steps of all methods; on every rank."""
    methods, layout = question
    task = gpt() if layout.computes else paused(PAUSE, WIDTH)
    os.environ[GRADIENTS_VARIABLE] = "1"
    recording, _ = train(Timed("alone", offbeat.alone(), ALONE), task)
    del os.environ[GRADIENTS_VARIABLE]
    found = profile_of([recording], Speeds.of_bandwidth(1e10))
    # Of the usual step: other load makes some of them longer.
    profile = replace(found.on_device(1 / median(found.spread)), spread=())
    if isinstance(task.model, Paused) and dist.get_rank() == 0:
        task.model.seconds *= layout.slow
    return profile, train_all(methods, task)


def dump(found: list[Cell], path: Path) -> None:
    """Write the cells so far: an interrupted run goes on from there."""
    path.write_text(json.dumps([vars(cell) for cell in found]), encoding="utf-8")


def load(path: Path) -> list[Cell]:
    """Read what :func:`dump` has written; nothing if there is no file."""
    return [Cell(**each) for each in json.loads(path.read_text("utf-8"))] if path.exists() else []
