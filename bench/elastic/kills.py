"""Workers killed every 20 s and every 5 s under each recipe, beside torchft.

Every worker computes for a second a step: a pause. One that is killed starts again after a second.
"""

import multiprocessing as mp
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from statistics import median

from matplotlib.figure import Figure

from bench.elastic.runs import Case, Run, disturb
from bench.harness import GOAL, Bench, Claim, Result, command, console, files
from bench.harness.environment import environment

RECIPES = (
    "ddp", "lags(density=0.1)", "adasum", "local_sgd(every=4)", "diloco(every=4)",
    "diloco(every=4,fragments=2,delay=1)", "sgp(overlap=1)", "daso(every=2,wait=1)",
)  # fmt: skip
PEERS = "torchft DDP", "torchft DiLoCo(4)"
PUBLISHED = ("ddp", "torchft DDP"), (60.0, 15.0), 8, 10.9  # torchft's: kills, workers, step
SHARES = {20.0: 0.92, 5.0: 0.80, 60.0: 0.95, 15.0: 0.85}  # goals, by seconds between two kills
GAP, BACK = 2.5, 2.0  # goals, in seconds, with steps of a second
AGAIN = "trains again after its imports"
LOST = (  # where the rest of the time goes
    "unfinished", "uncommitted", "detection", "agreement", "connecting", "admission", "waiting",
    "healing", "other",
)  # fmt: skip
SHOWN = {  # in the picture: of the lost workers, of the others and the newcomers
    "not in an exchange": ("unfinished", "uncommitted"),
    "going on": ("detection", "agreement", "connecting"),
    "joining": ("admission", "waiting", "healing"),
}
HEADINGS = (
    "method", "kill every", "workers x step", "minutes", "kills", "useful", "longest gap",
    "back after", "steps lost", *LOST, "fault",
)  # fmt: skip
# Torch looks up the name of each address that it connects to, for 5 s by default.
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
MISSING = "torchft is not installed: its rows are left out; see bench.outer.torchft"
BENCH = Bench(
    name="elastic/kills",
    claim="Runs of every recipe go on while workers are killed and started again",
    minutes=4,
    full_minutes=36,
)


def row(run: Run) -> tuple[str, ...]:
    case, found = run.case, run.score
    back = f"{median(found.back):.1f}, at most {max(found.back):.1f} s" if found.back else "never"
    lost = [_percent(found.parts.get(part, 0.0), found.living) for part in LOST]
    return (
        case.text, f"{case.every:g} s", f"{case.workers} x {case.step:g} s",
        f"{case.seconds / 60:.1f}", f"{run.kills}", _percent(found.useful, found.living),
        f"{found.gap:.1f} s", back, f"{found.lost}", *lost, run.fault or "none",
    )  # fmt: skip


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1e-9):.1f} %"


def claims(runs: Sequence[Run]) -> list[Claim]:
    """On this library's runs: the worst of each kind."""
    ours, made = [run for run in runs if not run.case.is_peer], []
    for every, goal in SHARES.items():
        shares = {
            run.score.useful / run.score.living: run.case.text
            for run in ours
            if run.case.every == every and run.score.living
        }
        if shares:
            least = min(shares)
            text = f"useful time of the living workers, a kill every {every:g} s"
            said = f"{100 * least:.1f} % ({shares[least]})"
            made.append(Claim(text, f"at least {goal:.0%}", said, least >= goal, GOAL))
    short = [run for run in ours if run.case.step == 1.0]
    back = [run for run in short if run.score.back]
    for text, goal, values in (
        ("longest time between two steps of a worker", GAP, {r.score.gap: r for r in short}),
        (f"a worker {AGAIN}, median", BACK, {median(r.score.back): r for r in back}),
        (f"a worker {AGAIN}", BACK, {max(r.score.back): r for r in back}),
    ):
        if values:
            most = max(values)
            case = values[most].case
            said = f"{most:.1f} s ({case.text}, every {case.every:g} s)"
            made.append(Claim(text, f"at most {goal:g} s", said, most <= goal, GOAL))
    faults = [f"{run.case.text}: {run.fault}" for run in ours if run.fault]
    kills = sum(run.kills for run in ours)
    said = "; ".join(faults) or f"none in {kills} kills"
    return [*made, Claim("hangs, ends and models that differ", "none", said, not faults, GOAL)]


def draw(runs: Sequence[Run]) -> None:
    """Where the time of the living workers goes."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for axes, every in zip(figure.subplots(1, 2, sharey=True), SHARES, strict=False):
        found = [run for run in runs if (run.case.every, run.case.workers) == (every, 4)][::-1]
        texts, left = [run.case.text for run in found], [0.0] * len(found)
        for name in ("steps that count", *SHOWN, "other"):
            shares = [100 * _seconds(run, name) / max(run.score.living, 1e-9) for run in found]
            axes.barh(texts, shares, left=left, label=name)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.axvline(100 * SHARES[every], color="k", linewidth=0.8, linestyle=":")
        axes.set(xlim=(0, 100), title=f"a kill every {every:g} s", xlabel="% of the time")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(files.ASSETS / "elastic.png", dpi=110)


def _seconds(run: Run, name: str) -> float:
    if name == "steps that count":
        return run.score.useful
    return sum(run.score.parts.get(part, 0.0) for part in SHOWN.get(name, (name,)))


@command(
    BENCH, "--full", "--seconds 60 --jobs 4",
    seconds="Of each run, after all workers have come in.", jobs="Runs at the same time.",
    full="10 minutes each, and the schedules that torchft has published.",
)  # fmt: skip
def app(seconds: float = 120.0, jobs: int = 20, full: bool = False) -> Result:
    """Kill a worker of each run every 20 s, or every 5 s."""
    has_peer = find_spec("torchft") is not None
    if not has_peer:
        console.print(MISSING, markup=False)
    length = 600.0 if full else seconds
    cases = [Case(text, every, length) for every in (20.0, 5.0) for text in (*RECIPES, *PEERS)]
    if full:
        texts, periods, workers, step = PUBLISHED
        cases += [Case(t, every, 2 * length, workers, step) for every in periods for t in texts]
    os.environ |= environment() | RESOLVER
    context = mp.get_context("forkserver")
    preload = ["bench.elastic.runs", "bench.harness.command"]
    context.set_forkserver_preload([*preload, *(["bench.elastic.peer"] if has_peer else [])])
    chosen = [case for case in cases if has_peer or not case.is_peer]
    longest_first = sorted(chosen, key=lambda case: -case.seconds)
    runs = []
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(disturb, context, case) for case in longest_first]):
            runs.append(done.result())
            console.print("  ".join(row(runs[-1])), style="dim", markup=False)
    runs.sort(key=lambda run: chosen.index(run.case))
    draw(runs)
    title = "Workers that are killed, and started again after a second; steps are pauses"
    return Result(title, HEADINGS, [*map(row, runs)], claims(runs), runs)
