"""How soon methods reach the loss of ddp with more workers, which are rows of one tensor."""

from bench.choose.runs import DDP, LINKS, Runs, Tuned
from bench.choose.tasks import TASKS
from bench.harness import GOAL, Bench, Result, at_least, command, numbers

METHODS = {  # that rows know, each with its better setting of choose/sooner
    "ddp": (DDP,),
    "sgp": ("sgp(overlap=2)",),
    "daso": ("daso(every=8)",),
    "local_sgd": ("local_sgd(every=24)",),
}
HEADINGS = ("workers", "recipe", *LINKS, "rate", "steps are worth")
BENCH = Bench(name="choose/workers", minutes=8)
TUNED = 32  # workers of a run that is tuned, at most; more take the rates of the number before
STEPS = 800  # of a run at the best rate, at most


@command(BENCH, "--workers 8,32,128")
def app(workers: str = "8", seeds: int = 1) -> Result:
    """Compare the times on all links; runs are recorded as they end."""
    runs, rows, claims = Runs.read(seeds, BENCH.name), [], []
    alone = Runs.read(seeds).alone[TASKS[0].name]  # as long as with four workers
    runs.alone = {TASKS[0].name: alone}
    before: Tuned | None = None
    for count in numbers(workers):
        tuned = Tuned(runs, TASKS[0], count, METHODS, before if count > TUNED else None, STEPS)
        before = tuned
        for method, (recipe,) in METHODS.items():
            sooner = [tuned.sooner(method, link) for link in LINKS]
            worth, rate = tuned.worth(recipe), tuned.rates[recipe]
            cells = (str(each) if each.size else "-" for each in (*sooner, worth))
            *by_link, steps = cells
            rows.append((f"{count}", recipe, *by_link, f"{rate:.2g}", steps))
        for link in [*LINKS][:3]:
            best = max(tuned.sooner(method, link).size for method in METHODS)
            text = f"{count} workers, {link}: the best is as many times as soon"
            claims.append(at_least(text, best, 2.0, source=GOAL))
    title = f"How many times as soon as ddp, GPT, seeds: {seeds}"
    return Result(title, HEADINGS, rows, claims, picture=runs)
