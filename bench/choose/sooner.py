"""Seconds until the loss that ddp reaches at the end of its own tuned run, by method and link.

Four workers, which are threads, train three tasks. Losses by steps are measured once; the seconds
of a step are those that ``offbeat plan`` predicts from a step of one worker alone.
"""

from statistics import median

import numpy as np
from matplotlib.figure import Figure

import offbeat
from bench.choose.runs import DDP, METHODS, Runs, Tuned
from bench.choose.tasks import LOOK, TASKS, WORKERS, constant
from bench.harness import GOAL, NEAR, Bench, Claim, Effect, Result, command, console, files
from bench.harness.case import Case
from bench.harness.seeds import in_lab
from offbeat.plan import Fabric, Parameter, Profile, Speeds, predict

LINKS = {  # bit/s, seconds of a message beside its bytes: half a round trip
    "25 Mbit/s": (25e6, 1e-4),
    "100 Mbit/s": (100e6, 1e-4),
    "100 Mbit/s, 100 ms": (100e6, 0.05),
    "1 Gbit/s": (1e9, 1e-4),
}
SLOW, MIDDLE = list(LINKS)[:3], "100 Mbit/s"
HEADINGS = ("task", "method", *LINKS, "recipe at 100 Mbit/s", "rate", "steps are worth", "names")
BENCH = Bench(
    name="choose/sooner",
    claim="How soon each method reaches the last loss of ddp",
    minutes=1,
    full_minutes=60,
)


class Cells:
    """A task on all links."""

    def __init__(self, tuned: Tuned) -> None:
        layers = [Parameter(name, p.numel()) for name, p in tuned.task.net().named_parameters()]
        times, speeds = tuned.runs.alone[tuned.task.name], Speeds.of_bandwidth(1e10)
        profile = Profile.by_size(layers, *times, speeds)
        self.tuned = tuned
        self.seconds = {  # of a step
            (recipe, link): predict(
                offbeat.algorithm(recipe), profile,
                Fabric(nodes=WORKERS, rate=rate, latency=latency),
            ).seconds
            for recipe in tuned.rates
            for link, (rate, latency) in LINKS.items()
        }  # fmt: skip

    def recipe(self, method: str, link: str) -> str:
        """The better of the method's two, with the first seed."""
        return min(METHODS[method], key=lambda r: self.tuned.steps(r) * self.seconds[r, link])

    def sooner(self, method: str, link: str) -> Effect:
        """The factor over ddp."""
        recipe = self.recipe(method, link)
        faster = self.seconds[DDP, link] / self.seconds[recipe, link]
        worth = self.tuned.worth(recipe)
        return Effect(faster * worth.size, "x", faster * worth.error)

    def row(self, method: str) -> tuple[str, ...]:
        """One line."""
        recipe = self.recipe(method, MIDDLE)
        names = self.tuned.course(recipe).identifiers
        return (
            self.tuned.task.name, method, *(shown(self.sooner(method, link)) for link in LINKS),
            recipe, f"{self.tuned.rates[recipe]:.2g}", shown(self.tuned.worth(recipe)),
            "" if names is None else f"{names:.1f}%",
        )  # fmt: skip

    @property
    def most(self) -> list[float]:
        """Of all methods, on links on which ddp waits."""
        return [max(self.sooner(method, link).size for method in METHODS) for link in SLOW]


def claims(found: list[Cells]) -> list[Claim]:
    """On time, and on what models foretell that have the same loss."""
    factors = [each for cells in found for each in cells.most]
    by_task = "; ".join(
        f"{cells.tuned.task.name} {', '.join(f'{each:.1f}' for each in cells.most)} x"
        for cells in found
    )
    gpt = found[0]
    names = {m: gpt.tuned.course(gpt.recipe(m, MIDDLE)).identifiers for m in METHODS}
    gaps = {m: each - (names["ddp"] or 0) for m, each in names.items() if each is not None}
    worst = min(gaps, key=lambda method: gaps[method])
    enough = sum(each >= 2 for each in factors)
    return [
        Claim(f"some method is there at least twice as soon: {', '.join(SLOW)}", "8 of 9 cells",
              f"{enough} of {len(factors)}: {by_task}", enough >= 8 / 9 * len(factors), GOAL),
        Claim("GPT: at that loss names are foretold as well as after ddp", "1 % lower at most",
              f"{worst} {gaps[worst]:+.1f} %", gaps[worst] > -NEAR, GOAL),
    ]  # fmt: skip


def shown(factor: Effect) -> str:
    """A line for a loss that was not reached."""
    return str(factor) if factor.size else "-"


def draw(cells: Cells) -> None:
    """Losses over seconds at 100 Mbit/s."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in METHODS:
        recipe = cells.recipe(method, MIDDLE)
        losses = cells.tuned.course(recipe).losses
        times = LOOK * cells.seconds[recipe, MIDDLE] * (np.arange(len(losses)) + 1)
        axes.plot(times, losses, label=recipe, color="k" if method == "ddp" else None)
    axes.axhline(cells.tuned.targets[0], color="0.6", linestyle=":")
    axes.set(xscale="log", xlabel="seconds", ylabel="held-out loss of the average model")
    axes.legend(fontsize="small")
    figure.savefig(files.ASSETS / "choosing.png", dpi=110)


def checked(cells: Cells) -> Claim:
    """Steps that are timed in real processes, which share this machine's cores."""
    task, first = cells.tuned.task, [recipes[0] for recipes in METHODS.values()]
    cases = [
        Case(r, task, offbeat.algorithm(r), WORKERS, 50, cells.tuned.rates[r], constant)
        for r in first
    ]
    times = [outcome.seconds for outcome in in_lab(cases, "100mbit")]
    errors = [cells.seconds[r, MIDDLE] / t - 1 for r, t in zip(first, times, strict=True)]
    for recipe, seconds, error in zip(first, times, errors, strict=True):
        console.print(f"{recipe}: {1e3 * seconds:.1f} ms a step, the plan is {error:+.0%} off")
    off = median(map(abs, errors))
    text = f"{task.name}: the plan of a step at {MIDDLE} agrees with the lab"
    return Claim(text, "25 % off", f"{off:.0%}", off < 0.25, GOAL)


@command(
    BENCH, "--full", "--check", full="Train all anew, rather than what is not recorded.",
    check="Time the steps of the first task in the lab too.", tasks="Those that are trained.",
)  # fmt: skip
def app(
    full: bool = False, check: bool = False, tasks: str = "GPT,digits,LSTM", seeds: int = 3
) -> Result:
    """Compare the times of all methods on all links; runs are recorded as they end."""
    runs = Runs({}, {}, seeds) if full else Runs.read(seeds)
    found = [Cells(runs.of(task)) for task in TASKS if task.name in tasks.split(",")]
    rows = [cells.row(method) for cells in found for method in METHODS]
    draw(found[0])
    judged = claims(found) + ([checked(found[0])] if check else [])
    title = f"How many times as soon as ddp, {WORKERS} workers, seeds: {seeds}"
    return Result(title, HEADINGS, rows, judged, picture=runs)
