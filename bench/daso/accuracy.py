"""Accuracy and IoU of DASO by number of workers, and what its parts contribute (Figures 7, 9).

Digits with BatchNorm stand for ImageNet, generated shapes for CityScapes; two workers per node.
Of Figure 9 the paper says that neither method matches the baseline of few workers.
The number of samples is the same for all world sizes, and the learning rate grows with the number
of workers, as in the paper.
"""

from collections.abc import Iterator

import offbeat
from bench.daso.tasks import SHAPES, TASKS
from bench.harness import GOAL, NEAR, Bench, Claim, Result, command
from bench.harness.case import Case, Outcome
from bench.harness.seeds import Runs, in_threads, over_seeds

PER_NODE = 2
WORLDS = FEW, MIDDLE, MANY = (4, 8, 16)  # MIDDLE: also leave a part out
DDP, DASO, NO_COOL_DOWN = "ddp", "DASO", "no cool-down"
EVERY = {DASO: 4, NO_COOL_DOWN: 4, "B = 2": 2, "B = 8": 8, "B = 16": 16}
RARER = ("B = 2", DASO, "B = 8", "B = 16")
HEADINGS = ("task", "workers", "method", "steps", "held out", "against ddp")
BENCH = Bench(
    name="daso/accuracy",
    claim="DASO is as accurate as averaging (Fig. 7, 9)",
    minutes=6,
    full_minutes=18,
    evidence={"Fig. 7, 9": ""},  # with daso/workers
)
Found = dict[tuple[str, int, str], Runs]  # by task, workers, method


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
            method = algorithm(name, steps)
            yield Case(name, task, method, workers, steps, rate * workers, halved,
                       per_node=PER_NODE)  # fmt: skip


def claims(task: str, found: Found, apart: float) -> list[Claim]:
    """``apart`` are the replicas at the end of a run without a cool-down."""
    of = {key[1:]: runs.mean for key, runs in found.items() if key[0] == task}
    gaps = [of[workers, DASO] - of[workers, DDP] for workers in WORLDS]
    fall = {name: of[FEW, name] - of[MANY, name] for name in (DDP, DASO)}
    parts = [of[MIDDLE, name] for name in RARER]
    gain = of[MIDDLE, DASO] - of[MIDDLE, NO_COOL_DOWN]
    return [
        Claim(f"{task}: DASO comes near ddp but with the most workers",
              "similar up to 128 GPUs", ", ".join(f"{gap:+.1f} %" for gap in gaps),
              min(gaps[:-1]) > -NEAR, GOAL),
        Claim(f"{task}: many workers are worse, with DASO more so", "at 256 GPUs below 75 %",
              f"ddp {fall[DDP]:.1f} %, DASO {fall[DASO]:.1f} %", fall[DASO] > fall[DDP] > 0, GOAL),
        Claim(f"{task}: the cool-down makes up for deviations", "reduces slight errors",
              f"{gain:+.1f} %, replicas were {apart:.2g} apart", gain > 0, GOAL),
        Claim(f"{task}: rarer exchanges are worse, B = 2, 4, 8, 16", "B = 4 was chosen",
              ", ".join(f"{value:.1f} %" for value in parts), parts[-1] < parts[0], GOAL),
    ]  # fmt: skip


def figure_9(found: Found) -> Claim:
    """Its source has Figure 7 too, that of daso/workers."""
    runs = (FEW, DDP), (MANY, DDP), (MANY, DASO)
    baseline, *with_most = (found[SHAPES.name, *run].mean for run in runs)
    text = f"shapes: with {MANY} workers neither reaches ddp with {FEW} (Fig. 9)"
    ours = f"ddp {with_most[0]:.1f} %, DASO {with_most[1]:.1f} % against {baseline:.1f} %"
    is_worse = max(with_most) < baseline - NEAR
    return Claim(text, "neither matches the baseline", ours, is_worse, "Fig. 7, 9")


def follow(case: Case) -> tuple[Outcome, float]:
    """Train, and look at the end how far the replicas are apart."""
    apart = []

    def look(replica: offbeat.Replica, step: int) -> None:
        if step + 1 == case.steps:
            apart.append(replica.consensus_distance()["mean"])

    return in_threads(case, after=look), apart[0]


@command(BENCH, "--full", full="Three seeds instead of one.", images="Share of the usual number.")
def app(full: bool = False, images: float = 1.0) -> Result:
    """Compare DASO and averaged gradients on two tasks."""
    found: Found = {}
    apart: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []

    def train(case: Case) -> Outcome:
        if case.name != NO_COOL_DOWN:
            return in_threads(case)
        outcome, apart[case.task.name] = follow(case)
        return outcome

    for case in cases(images):
        task, workers, name = case.task.name, case.workers, case.name
        runs = found[task, workers, name] = over_seeds(train, case, 3 if full else 1)
        against = f"{runs.mean - found[task, workers, DDP].mean:+.1f}%"
        rows.append((task, f"{workers}", name, f"{case.steps}", f"{runs.mean:.1f}%", against))
    judged = [claim for task, end in apart.items() for claim in claims(task, found, end)]
    title = "Figures 7 and 9: held-out accuracy and IoU"
    raw = {", ".join(map(str, key)): runs for key, runs in found.items()}
    return Result(title, HEADINGS, rows, [*judged, figure_9(found)], raw=raw)
