"""Accuracy and IoU of DASO by number of workers, and what its parts contribute (Figures 7, 9).

Digits with BatchNorm stand for ImageNet, generated shapes for CityScapes; two workers per node.
Of Figure 9 the paper says that neither method matches the baseline of few workers.
The number of samples is the same for all world sizes, and the learning rate grows with the number
of workers, as in the paper.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean
from typing import Annotated

import typer

import offbeat
from bench.daso.picture import draw
from bench.daso.task import DIGITS, SHAPES, Case, Outcome, in_threads
from bench.harness import files
from bench.harness.bench import Bench
from bench.harness.claim import GOAL, Claim
from bench.harness.console import console
from bench.harness.report import report

Recipe = Callable[[int], offbeat.Algorithm]  # of the number of steps
SAMPLES = {DIGITS: 16_000, SHAPES: 6_000}
DRAWN = 8  # workers of the runs that are followed, and of those that leave a part out
FIGURE_9 = "Fig. 7, 9"  # daso/workers has Figure 7
PARTS = ("no cool-down", "B = 2", "B = 8", "B = 16")
DRAWN_METHODS = ("ddp", "DASO", "no cool-down", "B = 16")
HEADINGS = ("task", "workers", "method", "steps", "held out", "against ddp")
BENCH = Bench(
    name="daso/accuracy",
    claim="DASO is as accurate as averaging (Fig. 7, 9)",
    minutes=6,
    full_minutes=18,
    evidence={"Fig. 7, 9": ""},  # with daso/workers
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Found = dict[tuple[str, int, str], list[Outcome]]  # by task, workers, method; one for each seed


def ddp(steps: int) -> offbeat.Algorithm:
    return offbeat.ddp()


def daso(every: int, cool_down: bool, steps: int) -> offbeat.Algorithm:
    """Plateaus are counted in windows of a fiftieth of the run, five of them: a tenth."""
    phase = max(1, steps // 20)
    return offbeat.daso(
        every=every,
        total_steps=steps,
        warmup_steps=phase,
        cooldown_steps=phase if cool_down else 0,
        report_every=max(1, steps // 50),
        patience=5,
    )


def recipe(name: str) -> Recipe:
    if name == "ddp":
        return ddp
    return partial(daso, int(name[4:]) if name.startswith("B") else 4, name != "no cool-down")


def cases(worlds: list[int], samples: float) -> list[Case]:
    """All runs of one seed."""
    wanted = [(task, w, name) for task in SAMPLES for w in worlds for name in ("ddp", "DASO")]
    wanted += [(task, DRAWN, name) for task in SAMPLES for name in PARTS]
    return [
        Case(name, task, recipe(name), w, int(samples * SAMPLES[task]), follow=w == DRAWN)
        for task, w, name in wanted
    ]


def quality(found: Found, task: str, workers: int, name: str) -> float:
    """In per cent; the mean over seeds."""
    return 100 * fmean(outcome.quality for outcome in found[task, workers, name])


def rows(found: Found) -> list[tuple[str, ...]]:
    return [
        (
            task, f"{workers}", name, f"{len(outcomes[0].losses)}",
            f"{quality(found, task, workers, name):.1f}%",
            f"{quality(found, task, workers, name) - quality(found, task, workers, 'ddp'):+.1f}%",
        )
        for (task, workers, name), outcomes in found.items()
    ]  # fmt: skip


def claims(found: Found, worlds: list[int]) -> list[Claim]:
    made = []
    few, many = min(worlds), max(worlds)
    for task in SAMPLES:
        of = partial(quality, found, task.name)
        gaps = [of(w, "DASO") - of(w, "ddp") for w in worlds]
        fall = {name: of(few, name) - of(many, name) for name in ("ddp", "DASO")}
        apart = found[task.name, DRAWN, "no cool-down"][0].course.distance[-1]
        parts = {name: of(DRAWN, name) for name in ("B = 2", "DASO", "B = 8", "B = 16")}
        made += [
            Claim(f"{task.name}: DASO comes near ddp but with the most workers",
                  "similar up to 128 GPUs", ", ".join(f"{gap:+.1f} %" for gap in gaps),
                  min(gaps[:-1]) > -1.0, GOAL),
            Claim(f"{task.name}: many workers are worse, with DASO more so",
                  "at 256 GPUs below 75 %", f"ddp {fall['ddp']:.1f} %, DASO {fall['DASO']:.1f} %",
                  fall["DASO"] > fall["ddp"] > 0, GOAL),
            Claim(f"{task.name}: the cool-down makes up for deviations",
                  "reduces slight errors",
                  f"{of(DRAWN, 'DASO') - of(DRAWN, 'no cool-down'):+.1f} %, replicas were "
                  f"{apart:.2g} apart", of(DRAWN, "DASO") > of(DRAWN, "no cool-down"), GOAL),
            Claim(f"{task.name}: rarer exchanges are worse, B = 2, 4, 8, 16", "B = 4 was chosen",
                  ", ".join(f"{value:.1f} %" for value in parts.values()),
                  parts["B = 16"] < parts["B = 2"], GOAL),
        ]  # fmt: skip
    runs = (few, "ddp"), (many, "ddp"), (many, "DASO")
    baseline, *with_most = (quality(found, SHAPES.name, *run) for run in runs)
    text = f"shapes: with {many} workers neither reaches ddp with {few} (Fig. 9)"
    ours = f"ddp {with_most[0]:.1f} %, DASO {with_most[1]:.1f} % against {baseline:.1f} %"
    is_worse = max(with_most) < baseline - 1.0
    return [*made, Claim(text, "neither matches the baseline", ours, is_worse, FIGURE_9)]


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Three seeds instead of one.")] = False,
    worlds: Annotated[str, typer.Option(help="Numbers of workers, 8 among them.")] = "4,8,16",
    samples: Annotated[float, typer.Option(help="Share of the usual number of images.")] = 1.0,
) -> None:
    """Compare DASO and averaged gradients on two tasks."""
    counts = sorted(map(int, worlds.split(",")))
    found: Found = {}
    for case in cases(counts, samples):
        runs = [in_threads(replace(case, seed=seed)) for seed in range(3 if full else 1)]
        found[case.task.name, case.workers, case.name] = runs
    picture = {
        task: {name: found[task.name, DRAWN, name][0] for name in DRAWN_METHODS} for task in SAMPLES
    }
    draw(picture, f"{DRAWN} workers", files.result(BENCH.name, ".png"))
    measured = {f"{t}, {w}, {n}": [asdict(o) for o in each] for (t, w, n), each in found.items()}
    title = "Figures 7 and 9: held-out accuracy and IoU"
    shown = {task.name: runs for task, runs in picture.items()}
    judged = claims(found, counts)
    report(BENCH, title, HEADINGS, rows(found), judged, picture=shown, raw=measured)
    console.print(f"picture: {files.result(BENCH.name, '.png').name}")


if __name__ == "__main__":
    app()
