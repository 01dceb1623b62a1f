"""What training ends with under several methods and from several seeds, beside the paper's."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

import torch

import offbeat
from bench.harness import Claim, Effect, console
from bench.lags.training import Curve, Task, train
from offbeat.testing import ThreadWorld

DENSE, SLGS, LAGS = "dense", "SLGS", "LAGS"


@dataclass(frozen=True)
class Runs:
    """The curves of each method, one for each seed."""

    task: Task
    curves: Mapping[str, list[Curve]]

    @property
    def ends(self) -> dict[str, list[float]]:
        """The last scores, one for each seed."""
        return {name: [curve[-1] for curve in curves] for name, curves in self.curves.items()}

    @property
    def means(self) -> dict[str, Curve]:
        """The mean curve of each method."""
        return {
            name: [*map(fmean, zip(*curves, strict=True))] for name, curves in self.curves.items()
        }

    def end(self, name: str, digits: int) -> str:
        """Mean and standard deviation of the last scores."""
        scores = self.ends[name]
        deviation = f" ± {stdev(scores):.{digits}f}" if len(scores) > 1 else ""
        return f"{fmean(scores):.{digits}f}{deviation}"

    def change(self, name: str, base: str = DENSE) -> Effect:
        """By how much a method's last scores differ from another's, seed by seed."""
        pairs = zip(self.ends[name], self.ends[base], strict=True)
        return Effect.mean([100 * (ours / other - 1) for ours, other in pairs])

    def printed(self, name: str, base: str = DENSE) -> Effect:
        """The same of the figures in the paper."""
        of = dict(zip((DENSE, SLGS, LAGS), self.task.paper, strict=True))
        return Effect(100 * (of[name] / of[base] - 1))

    def near(self, name: str, base: str = DENSE, paper: str = "", source: str = "") -> Claim:
        """Whether a method is worse than another by the largest loss in the paper at most."""
        ours = self.change(name, base)
        worse = -ours.size if self.task.more_is_better else ours.size
        score, other = self.task.score.__name__, "dense SGD" if base == DENSE else base
        return Claim(
            f"{self.task.name}: {name} is at most {self.task.near} % worse than {other}",
            paper or f"{self.printed(name, base)} {score}",
            f"{ours} {score}",
            worse <= self.task.near,
            source,
        )


def measure(
    task: Task, algorithms: Mapping[str, offbeat.Algorithm], steps: int, workers: int, seeds: int
) -> Runs:
    """Train under each algorithm; runs of one seed have the same start and the same batches."""
    torch.set_num_threads(1)
    task.parts()  # not in threads, each of which would read
    curves: dict[str, list[Curve]] = {name: [] for name in algorithms}
    for seed in range(seeds):
        torch.manual_seed(seed)  # not in threads, which share torch's generator
        start = task.model()
        for name, algorithm in algorithms.items():
            began = time.perf_counter()
            curve = ThreadWorld(workers).run(
                lambda world, s=start, a=algorithm, n=seed: train(world, task, s, a, steps, n),
                timeout=1000,
            )[0]
            curves[name].append(curve)
            spent = time.perf_counter() - began
            console.print(
                f"{task.name}, {name}, seed {seed}: {curve[-1]:.4g} ({spent:.0f} s)", style="dim"
            )
    return Runs(task, curves)
