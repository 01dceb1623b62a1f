"""DASO is as accurate as averaging, but with the most workers; what its parts contribute.

Figures 7 and 9. Digits stand for ImageNet and shapes for CityScapes; all sizes see equally many
samples, and the learning rate grows with the number of workers, as in the paper.
"""

from collections.abc import Iterator
from functools import cache, partial

import digits
import digits_cnn
import segmentation

import offbeat
from bench.harness import GOAL, NEAR, Bench, Claim, Result, command
from bench.harness.case import SGD, Case, Data, Outcome, Part, Task
from bench.harness.seeds import in_threads, over_seeds


def split(train: Part, heldout: Part) -> Data:
    return train, {"heldout": heldout}


DECAYED = partial(SGD, weight_decay=1e-4)
DIGITS = Task(  # with BatchNorm
    "digits", digits_cnn.net, cache(lambda: split(*digits.small())), 16,
    lambda *case: 100 * digits_cnn.evaluate(*case)[1], optimizer=DECAYED,
)  # fmt: skip
PICTURES = segmentation.pictures
SHAPES = Task(  # to segment
    "shapes", segmentation.UNet,
    cache(lambda: split(PICTURES(2000, seed=1), PICTURES(200, seed=0))), 8,
    lambda *case: 100 * segmentation.evaluate(*case)[1], optimizer=DECAYED,
)  # fmt: skip
TASKS = {DIGITS: (16_000, 0.05 / 4), SHAPES: (6_000, 0.1 / 4)}  # images; the rate of one worker
WORLDS = FEW, MIDDLE, MANY = (4, 8, 16)  # MIDDLE: also leave a part out
DDP, DASO, NO_COOL_DOWN = "ddp", "DASO", "no cool-down"
EVERY = {DASO: 4, NO_COOL_DOWN: 4, "B = 2": 2, "B = 8": 8, "B = 16": 16}
RARER = ("B = 2", DASO, "B = 8", "B = 16")
HEADINGS = ("task", "workers", "method", "steps", "held out", "against ddp")
BENCH = Bench(
    name="daso/accuracy",
    minutes=6,
    full_minutes=18,
    evidence={"Fig. 7, 9": ""},  # with daso/workers
)


def halved(step: int, steps: int) -> float:
    """The paper's: warmed up in 5 of 90 epochs, halved six times."""
    return min(1.0, 18 * step / steps + 1 / steps) * 0.5 ** int(6 * step / steps)


def algorithm(name: str, steps: int) -> offbeat.Algorithm:
    """Plateaus are counted in windows of a fiftieth of the run, five of them: a tenth."""
    phase, window = max(1, steps // 20), max(1, steps // 50)
    cool_down = 0 if name == NO_COOL_DOWN else phase
    return offbeat.ddp() if name == DDP else offbeat.daso(
        every=EVERY[name], total_steps=steps, warmup_steps=phase, cooldown_steps=cool_down,
        report_every=window, patience=5,
    )  # fmt: skip


def cases(share: float) -> Iterator[Case]:
    """All runs of one seed, with this share of the images."""
    wanted = [(workers, name) for workers in WORLDS for name in (DDP, DASO)]
    wanted += [(MIDDLE, name) for name in EVERY if name != DASO]
    for task, (images, rate) in TASKS.items():
        for workers, name in wanted:
            steps = task.steps(share * images, workers)
            yield Case(name, task, algorithm(name, steps), workers, steps, rate * workers, halved,
                       per_node=2)  # fmt: skip


def follow(case: Case) -> tuple[Outcome, float]:
    """Train, and look at the end how far the replicas are apart."""
    apart = []

    def look(replica: offbeat.Replica, step: int) -> None:
        if step + 1 == case.steps:
            apart.append(replica.consensus_distance()["mean"])

    return in_threads(case, after=look), apart[0]


@command(BENCH, "--full", full={"seeds": 3}, images="Share of the usual number.")
def app(seeds: int = 1, images: float = 1.0) -> Result:
    """Compare DASO and averaged gradients on two tasks, two workers per node."""
    rows, claims, found, apart = [], [], {}, {}

    def train(case: Case) -> Outcome:
        if case.name != NO_COOL_DOWN:
            return in_threads(case)
        outcome, apart[case.task.name] = follow(case)
        return outcome

    for case in cases(images):
        task, workers, name = key = case.task.name, case.workers, case.name
        runs = found[key] = over_seeds(train, case, seeds)
        against = f"{runs.mean - found[task, workers, DDP].mean:+.1f}%"
        rows.append((task, f"{workers}", name, f"{case.steps}", f"{runs.mean:.1f}%", against))
    for task, end in apart.items():
        of = {key[1:]: runs.mean for key, runs in found.items() if key[0] == task}
        gaps = [of[workers, DASO] - of[workers, DDP] for workers in WORLDS]
        fall = {name: of[FEW, name] - of[MANY, name] for name in (DDP, DASO)}
        parts = [of[MIDDLE, name] for name in RARER]
        gain = of[MIDDLE, DASO] - of[MIDDLE, NO_COOL_DOWN]
        claims += [
            Claim(f"{task}: DASO comes near ddp but with the most workers",
                  "similar up to 128 GPUs", ", ".join(f"{gap:+.1f} %" for gap in gaps),
                  min(gaps[:-1]) > -NEAR, GOAL),
            Claim(f"{task}: many workers are worse, with DASO more so", "at 256 GPUs below 75 %",
                  f"ddp {fall[DDP]:.1f} %, DASO {fall[DASO]:.1f} %", fall[DASO] > fall[DDP] > 0,
                  GOAL),
            Claim(f"{task}: the cool-down makes up for deviations", "reduces slight errors",
                  f"{gain:+.1f} %, replicas were {end:.2g} apart", gain > 0, GOAL),
            Claim(f"{task}: rarer exchanges are worse, B = 2, 4, 8, 16", "B = 4 was chosen",
                  ", ".join(f"{value:.1f} %" for value in parts), parts[-1] < parts[0], GOAL),
        ]  # fmt: skip
    runs = (FEW, DDP), (MANY, DDP), (MANY, DASO)
    best, ddp, daso = (found[SHAPES.name, *run].mean for run in runs)
    text = f"shapes: with {MANY} workers neither reaches ddp with {FEW} (Fig. 9)"
    ours = f"ddp {ddp:.1f} %, DASO {daso:.1f} % against {best:.1f} %"
    is_worse = max(ddp, daso) < best - NEAR
    claims.append(Claim(text, "neither matches the baseline", ours, is_worse, "Fig. 7, 9"))
    title = "Figures 7 and 9: held-out accuracy and IoU"
    return Result(title, HEADINGS, rows, claims)
