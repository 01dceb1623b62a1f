"""Workers are killed every 20 s and every 5 s under each recipe, beside torchft."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

from matplotlib.figure import Figure

from bench.elastic.runs import Case, Run, disturb, forking
from bench.elastic.score import LOST
from bench.harness import GOAL, Bench, Claim, Result, at_least, at_most, command, console, files

RECIPES = (
    "ddp", "lags(density=0.1)", "adasum", "local_sgd(every=4)", "diloco(every=4)",
    "diloco(every=4,fragments=2,delay=1)", "sgp(overlap=1)", "daso(every=2,wait=1)",
)  # fmt: skip
PEERS = "torchft DDP", "torchft DiLoCo(4)"
PUBLISHED = ("ddp", "torchft DDP"), (60.0, 15.0), 8, 10.9  # torchft's: kills, workers, step
SHARES = {20.0: 0.92, 5.0: 0.80, 60.0: 0.95, 15.0: 0.85}  # goals, by seconds between two kills
GAP, BACK = 2.5, 2.0  # goals, in seconds, with steps of a second
HEADINGS = (
    "method", "kill every", "workers x step", "minutes", "kills", "useful", "longest gap",
    "back after", "steps lost", *LOST, "fault",
)  # fmt: skip
APART = 0.2  # seconds between kills of two runs: processes killed at once end slowly
START = 0.7  # seconds between two starts
MISSING = "torchft is not installed: its rows are left out; see bench.outer.torchft"
BENCH = Bench(name="elastic/kills", minutes=6, full_minutes=42)


def shares(run: Run) -> dict[str, float]:
    """Of the time of the living workers: what is useful, and where the rest goes."""
    found = {"useful": run.score.useful, **dict.fromkeys(LOST, 0.0), **run.score.parts}
    return {name: each / max(run.score.living, 1e-9) for name, each in found.items()}


def row(run: Run) -> tuple[str, ...]:
    case, found, share = run.case, run.score, shares(run)
    back = f"{median(found.back):.1f}, at most {max(found.back):.1f} s" if found.back else "never"
    return (
        case.text, f"{case.every:g} s", f"{case.workers} x {case.step:g} s",
        f"{case.seconds / 60:.1f}", f"{run.kills}", f"{100 * share['useful']:.1f} %",
        f"{found.gap:.1f} s", back, f"{found.lost}",
        *(f"{100 * share[part]:.1f} %" for part in LOST),
        run.fault or "none",
    )  # fmt: skip


def claims(runs: Sequence[Run]) -> list[Claim]:
    """On this library's runs: the worst of each kind."""
    ours, made = [run for run in runs if not run.case.is_peer], []
    for every, goal in SHARES.items():
        found = {shares(run)["useful"]: run.case.text for run in ours if run.case.every == every}
        if found:
            text = f"useful time of the living workers, a kill every {every:g} s"
            least = min(found)
            made.append(at_least(text, least, goal, "{:.1%}", f"({found[least]})", GOAL))
    short = [run for run in ours if run.case.step == 1.0]
    back = [(run, run.score.back) for run in short if run.score.back]
    for text, goal, values in (
        ("longest time between two steps of a worker", GAP, {r.score.gap: r for r in short}),
        ("a worker trains again after its imports, median", BACK, {median(b): r for r, b in back}),
        ("a worker trains again after its imports", BACK, {max(b): r for r, b in back}),
    ):
        if values:
            case = values[max(values)].case
            who = f"({case.text}, every {case.every:g} s)"
            made.append(at_most(text, max(values), goal, "{:.1f} s", who, GOAL))
    faults = [f"{run.case.text}: {run.fault}" for run in ours if run.fault]
    said = "; ".join(faults) or f"none in {sum(run.kills for run in ours)} kills"
    return [*made, Claim("hangs, ends and models that differ", "none", said, not faults, GOAL)]


def draw(runs: Sequence[Run]) -> None:
    """Where the time of the living workers goes."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for axes, every in zip(figure.subplots(1, 2, sharey=True), SHARES, strict=False):
        found = [run for run in runs if (run.case.every, run.case.workers) == (every, 4)][::-1]
        left = [0.0] * len(found)
        for part in ("useful", *LOST):
            widths = [100 * shares(run)[part] for run in found]
            axes.barh([run.case.text for run in found], widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.axvline(100 * SHARES[every], color="k", linewidth=0.8, linestyle=":")
        axes.set(xlim=(0, 100), title=f"a kill every {every:g} s", xlabel="% of the time")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(files.ASSETS / "elastic.png", dpi=110)


@command(
    BENCH, "--full", "--seconds 60 --jobs 4",
    seconds="Of each run, after all workers have come in.", jobs="Runs at the same time.",
    full="10 minutes each, and the schedules that torchft has published.",
)  # fmt: skip
def app(seconds: float = 120.0, jobs: int = 20, full: bool = False) -> Result:
    """Kill a worker of each run every 20 s, or every 5 s; it starts again after a second."""
    length = 600.0 if full else seconds
    cases = [Case(text, every, length) for every in (20.0, 5.0) for text in (*RECIPES, *PEERS)]
    if full:
        texts, periods, workers, step = PUBLISHED
        cases += [Case(t, every, 2 * length, workers, step) for every in periods for t in texts]
    preload = ["bench.elastic.peer"]
    if find_spec("torchft") is None:
        console.print(MISSING, markup=False)
        cases, preload = [case for case in cases if not case.is_peer], []
    cases = [replace(case, after=APART * i) for i, case in enumerate(cases)]
    context, runs = forking(*preload), []
    for of_peers in (False, True):  # not at once: beside torchft a killed process ends slowly
        together = [case for case in cases if case.is_peer == of_peers]
        with ThreadPoolExecutor(jobs) as pool:
            submitted = []
            for case in sorted(together, key=lambda case: -case.seconds):  # the longest first
                submitted.append(pool.submit(disturb, context, case))
                time.sleep(START)
            for done in as_completed(submitted):
                runs.append(done.result())
                console.print("  ".join(row(runs[-1])), style="dim", markup=False)
    runs.sort(key=lambda run: cases.index(run.case))
    draw(runs)
    title = "Workers that are killed, and started again after a second; steps are pauses"
    return Result(title, HEADINGS, [*map(row, runs)], claims(runs), runs)
