"""Measured and predicted times of a step, and the links of the lab that a plan is told of."""

import os
from dataclasses import dataclass, replace
from statistics import median

import torch.distributed as dist

import offbeat
from bench.harness import console
from bench.harness.gpt import gpt
from bench.harness.pause import Paused, paused
from bench.harness.step_times import StepTime, Timed, train, train_all
from offbeat.lab import Lab
from offbeat.lab.check import PAYLOAD, measure_links
from offbeat.plan import Fabric, Profile, Speeds, Stragglers
from offbeat.plan.methods.choice import slots_of
from offbeat.plan.predict import play_run
from offbeat.planner.measure import profile_of
from offbeat.telemetry.gradient_times import GRADIENTS_VARIABLE

WIDTH, PAUSE = 224, 0.2  # of eight layers, 1.6 MB; seconds of a step
ALONE = 12  # steps of the profile
BURST = 2**17  # bytes that the lab's links pass above their rate after a pause


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
class Links:
    """What ``offbeat lab --check`` measures: Mbit/s of payload, and of one byte both ways."""

    mbit: float
    inside_mbit: float
    round_trip: float  # seconds
    cores: int = os.cpu_count() or 1  # of the machine that emulates all nodes

    @classmethod
    def measured(cls, rate: str) -> "Links":
        with Lab(2, 2, rate) as runner:
            links = measure_links(runner)
        console.print(f"{rate}: {links.both_ways_mbit:.1f} Mbit/s, {links.round_trip_ms:.2f} ms")
        inside = links.inside_node_mbit or links.both_ways_mbit
        return cls(links.both_ways_mbit, inside, links.round_trip_ms / 1e3)

    def share(self, layout: Layout) -> float:
        """By how much longer software takes where all ranks run it, on the cores of one machine."""
        return max(1.0, layout.nodes * layout.each / self.cores)

    def fabric(self, layout: Layout) -> Fabric:
        share = self.share(layout)  # nearly all of a round trip here is software
        return Fabric(
            nodes=layout.nodes,
            ranks_per_node=layout.each,
            rate=1e6 * self.mbit / PAYLOAD,
            latency=share * self.round_trip / 2,
            inside_rate=1e6 * self.inside_mbit,
            inside_latency=share * self.round_trip / 4,
            burst=BURST,
        )


@dataclass(frozen=True)
class Cell:
    """A step of one method: seconds measured, and seconds predicted."""

    method: str
    layout: str
    rate: str
    measured: float
    predicted: float

    @classmethod
    def of(
        cls, method: Timed, layout: str, rate: str, measured: float, profile: Profile,
        fabric: Fabric, stragglers: Stragglers | None = None,
    ) -> "Cell":  # fmt: skip
        """Predict the very run that is measured: TCP's windows grow in its first steps."""
        slots, slow = slots_of(method.algorithm, profile, fabric), stragglers or Stragglers()
        factors = slow.draw(method.steps, fabric.nodes, fabric.ranks_per_node)
        clocks = play_run(slots, profile, fabric, factors, method.warm_up)
        seconds = float((clocks.now - clocks.began).max()) / (method.steps - method.warm_up)
        return cls(method.name, layout, rate, measured, seconds)

    @property
    def error(self) -> float:
        """The deviation of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1


def case(text: str, steps: int = 5, warm_up: int = 2) -> Timed:
    """A recipe, the steps that count, a multiple of its period, and those before them."""
    return Timed(text, offbeat.algorithm(text), warm_up + steps, warm_up)


def measure(question: tuple[list[Timed], Layout]) -> tuple[Profile, list[StepTime]]:
    """The profile of rank 0 alone, and the steps of all methods; on every rank."""
    methods, layout = question
    task = gpt() if layout.computes else paused(PAUSE, WIDTH)
    os.environ[GRADIENTS_VARIABLE] = "1"
    recording, _ = train(Timed("alone", offbeat.alone(), ALONE), task, finishes=False)
    del os.environ[GRADIENTS_VARIABLE]
    found = profile_of([recording], Speeds.of_bandwidth(1e10))
    # Of the usual step: other load makes some of them longer.
    profile = replace(found.on_device(1 / median(found.spread)), spread=())
    if isinstance(task.model, Paused) and dist.get_rank() == 0:
        task.model.seconds *= layout.slow
    return profile, train_all(methods, task, finishes=False)
