"""What training ends with under several methods and from several seeds, beside the paper's."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

import offbeat
from bench.harness import Claim, Effect
from bench.lags.training import Learnt, train

DENSE, SLGS, LAGS = "dense", "SLGS", "LAGS"


@dataclass(frozen=True)
class Runs:
    """The scores of each method at the end, one for each seed."""

    learnt: Learnt
    ends: Mapping[str, list[float]]

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
        of = dict(zip((DENSE, SLGS, LAGS), self.learnt.paper, strict=True))
        return Effect(100 * (of[name] / of[base] - 1))

    def near(self, name: str, base: str = DENSE, paper: str = "", source: str = "") -> Claim:
        """Whether a method is worse than another by the largest loss in the paper at most."""
        ours = self.change(name, base)
        worse = -ours.size if self.learnt.more_is_better else ours.size
        score, other = self.learnt.task.score.__name__, "dense SGD" if base == DENSE else base
        return Claim(
            f"{self.learnt.task.name}: {name} is at most {self.learnt.near} % worse than {other}",
            paper or f"{self.printed(name, base)} {score}",
            f"{ours} {score}",
            worse <= self.learnt.near,
            source,
        )


def measure(
    learnt: Learnt,
    algorithms: Mapping[str, offbeat.Algorithm],
    steps: int,
    workers: int,
    seeds: int,
) -> Runs:
    """Train under each algorithm; runs of one seed have the same start and the same batches."""
    ends = {
        name: [train(learnt, name, algorithm, steps, workers, seed) for seed in range(seeds)]
        for name, algorithm in algorithms.items()
    }
    return Runs(learnt, ends)
