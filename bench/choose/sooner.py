"""How soon each method reaches the loss that ddp reaches at the end of its own tuned run."""

import numpy as np
from matplotlib.figure import Figure

from bench.choose.runs import LINKS, METHODS, Runs, Tuned
from bench.choose.tasks import LOOK, TASKS, WORKERS
from bench.harness import GOAL, NEAR, Bench, Claim, Effect, Result, command, files
from offbeat.lab.check import PAYLOAD

SLOW, MIDDLE = list(LINKS)[:3], "100 Mbit/s"  # on the slow ones ddp waits
HEADINGS = ("task", "method", *LINKS, "recipe at 100 Mbit/s", "rate", "steps are worth", "names")
BENCH = Bench(name="choose/sooner", minutes=1, full_minutes=60)


def shown(factor: Effect) -> str:
    """A line for a loss that was not reached."""
    return str(factor) if factor.size else "-"


def foretold(tuned: Tuned, recipe: str) -> list[float]:
    """Characters of identifiers that the model foretells, in %, by seed; none for other tasks."""
    courses = [tuned.course(recipe, seed) for seed in range(tuned.runs.seeds)]
    return [course.identifiers for course in courses if course.identifiers is not None]


def travel(tuned: Tuned) -> list[str]:
    """For each link how many steps of a worker alone the model takes to pass it."""
    bits = 32 * sum(p.numel() for p in tuned.task.net().parameters())
    alone = sum(tuned.runs.alone[tuned.task.name])
    return [f"{bits / PAYLOAD / rate / alone:.1f}" for rate, _ in LINKS.values()]


def draw(tuned: Tuned) -> None:
    """Losses over seconds at 100 Mbit/s."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in METHODS:
        recipe = tuned.recipe(method, MIDDLE)
        losses = tuned.course(recipe).losses
        times = LOOK * tuned.seconds[recipe, MIDDLE] * (np.arange(len(losses)) + 1)
        axes.plot(times, losses, label=recipe, color="k" if method == "ddp" else None)
    axes.axhline(tuned.targets[0], color="0.6", linestyle=":")
    axes.set(xscale="log", xlabel="seconds", ylabel="held-out loss of the average model")
    axes.legend(fontsize="small")
    figure.savefig(files.ASSETS / "choosing.png", dpi=110)


@command(
    BENCH, "--full", full="Train all anew, rather than what is not recorded.",
    tasks="Those that are trained.",
)  # fmt: skip
def app(full: bool = False, tasks: str = "GPT,digits,LSTM", seeds: int = 3) -> Result:
    """Compare the times of all methods on all links; runs are recorded as they end."""
    runs = Runs({}, {}, seeds) if full else Runs.read(seeds)
    rows, most, names = [], {}, {}
    for tuned in (runs.of(task) for task in TASKS if task.name in tasks.split(",")):
        task = tuned.task.name
        for method in METHODS:
            recipe = tuned.recipe(method, MIDDLE)
            known = names[task, method] = foretold(tuned, recipe)
            rows.append((
                task, method, *(shown(tuned.sooner(method, link)) for link in LINKS), recipe,
                f"{tuned.rates[recipe]:.2g}", shown(tuned.worth(recipe)),
                f"{Effect.mean(known):.1f} %" if known else "",
            ))  # fmt: skip
        rows.append((task, "steps alone that the model travels", *travel(tuned), "", "", "", ""))
        if not most:
            draw(tuned)
        most[task] = [max(tuned.sooner(m, link).size for m in METHODS) for link in SLOW]
    factors = [factor for each in most.values() for factor in each]
    enough = sum(factor >= 2 for factor in factors)
    by_task = "; ".join(f"{t} {', '.join(f'{x:.1f}' for x in each)} x" for t, each in most.items())
    gaps = {
        method: Effect.between(known, names[task, "ddp"])
        for (task, method), known in names.items()
        if known and method != "ddp"
    }
    worst = min(gaps, key=lambda method: gaps[method].size)
    claims = [
        Claim(f"some method is there at least twice as soon: {', '.join(SLOW)}", "8 of 9 cells",
              f"{enough} of {len(factors)}: {by_task}", enough >= 8 / 9 * len(factors), GOAL),
        Claim("GPT: at that loss names are foretold as well as after ddp", "1 % lower at most",
              f"{worst} {gaps[worst]}", gaps[worst].size > -NEAR, GOAL),
    ]  # fmt: skip
    title = f"How many times as soon as ddp, {WORKERS} workers, seeds: {seeds}"
    return Result(title, HEADINGS, rows, claims, picture=runs)
