"""One task under all methods, tuned by the same budget; each run is recorded as it ends."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import inf

import offbeat
from bench.choose.tasks import LOOK, MOST, RATES, WORKERS, Course, follow, follow_rows, step_alone
from bench.harness import Effect, files
from bench.harness.case import Task
from offbeat.plan import Fabric, Parameter, Profile, Speeds, predict

DDP = "ddp()"
METHODS = {  # each with two values of its main setting, of which the first is tuned
    "ddp": (DDP,),
    "lags": ("lags(density=0.05)", "lags(density=0.01)"),
    "adasum": ("adasum()", "adasum(every=4)"),
    "sgp": ("sgp(overlap=1)", "sgp(overlap=2)"),
    "sgp, bf16": ("sgp(overlap=1,wire='bf16')", "sgp(overlap=2,wire='bf16')"),
    "daso": ("daso(every=4)", "daso(every=8)"),
    "local_sgd": ("local_sgd(every=8)", "local_sgd(every=24)"),
    "diloco": ("diloco(every=8)", "diloco(every=24)"),
    "streaming diloco": (
        "diloco(every=8,fragments=2,delay=3,wire='int8')",
        "diloco(every=24,fragments=2,delay=6,wire='int8')",
    ),
    "sparse_loco": ("sparse_loco(every=8)", "sparse_loco(every=24)"),
}
LINKS = {  # bit/s, seconds of a message beside its bytes: half a round trip
    "25 Mbit/s": (25e6, 1e-4),
    "100 Mbit/s": (100e6, 1e-4),
    "100 Mbit/s, 100 ms": (100e6, 0.05),
    "1 Gbit/s": (1e9, 1e-4),
}


def needed(losses: Sequence[float], target: float) -> float:
    """The first step at which a loss is as low, between two looks in proportion; infinite: none."""
    found = next((i for i, each in enumerate(losses) if each <= target), None)
    if not found:
        return inf if found is None else LOOK
    before, after = losses[found - 1], losses[found]
    return LOOK * (found + (before - target) / (before - after))


@dataclass
class Runs:
    """All runs so far, by task, recipe, rate and seed, and the parts of a step alone, by task."""

    courses: dict[str, Course]
    alone: dict[str, list[float]]
    seeds: int
    name: str = "choose/sooner"  # of the bench

    @classmethod
    def read(cls, seeds: int, name: str = name) -> "Runs":
        """Those that were recorded here, or else those of the committed result."""
        paths = files.raw(f"{name}-runs"), files.result(name)
        path = next((each for each in paths if each.exists()), None)
        found = json.loads(path.read_text("utf-8"))["picture"] if path else {}
        courses = {name: Course(**each) for name, each in found.get("courses", {}).items()}
        return cls(courses, found.get("alone", {}), seeds, name)

    def write(self) -> None:
        text = json.dumps({"picture": asdict(self)})
        files.raw(f"{self.name}-runs").write_text(text, encoding="utf-8")

    def of(self, task: Task) -> "Tuned":
        if task.name not in self.alone:
            self.alone[task.name] = step_alone(task)
            self.write()
        return Tuned(self, task)


@dataclass(frozen=True)
class Tuned:
    """One task under all methods, at their best rates, on all links."""

    runs: Runs
    task: Task
    workers: int = WORKERS  # more are rows of one tensor
    methods: Mapping[str, Sequence[str]] = field(default_factory=lambda: METHODS)
    like: "Tuned | None" = None  # whose rates are taken
    most: int = MOST  # steps of the run at the best rate, if it needs as many

    @cached_property
    def rates(self) -> dict[str, float]:
        """The best rate of each method, by recipe."""
        return {r: self.best(recipes[0]) for recipes in self.methods.values() for r in recipes}

    @cached_property
    def targets(self) -> list[float]:
        """The loss that ddp reaches at the end of its own tuned run, by seed."""
        rate = self.best(DDP)
        return [self.run(DDP, rate, seed).losses[-1] for seed in range(self.runs.seeds)]

    @cached_property
    def seconds(self) -> dict[tuple[str, str], float]:
        """Of a step, by recipe and link, as predicted from a step of one worker alone."""
        layers = [Parameter(name, p.numel()) for name, p in self.task.net().named_parameters()]
        alone, found = self.runs.alone[self.task.name], {}
        profile = Profile.by_size(layers, *alone, Speeds.of_bandwidth(1e10))
        for link, (rate, latency) in LINKS.items():
            fabric = Fabric(nodes=self.workers, rate=rate, latency=latency)
            for recipe in self.rates:
                made = predict(offbeat.algorithm(recipe), profile, fabric)
                found[recipe, link] = made.seconds
        return found

    def run(self, recipe: str, rate: float, seed: int = 0, most: int = MOST) -> Course:
        """A run that is recorded, or else is made now: until the target, that of ddp to its end."""
        is_virtual, courses = self.workers > WORKERS, self.runs.courses
        of = f"{self.task.name}, {self.workers}" if is_virtual else self.task.name
        name = f"{of}, {recipe}, {rate:g}, {seed}"
        target = -inf if recipe == DDP else self.targets[seed]
        if name not in courses or (is_virtual and courses[name].is_short(target, most)):
            if is_virtual:
                course = follow_rows(self.task, recipe, rate, seed, target, self.workers, most)
            else:
                course = follow(self.task, recipe, rate, seed, target)
            courses[name] = course
            self.runs.write()
        return courses[name]

    def best(self, recipe: str) -> float:
        """The best of three rates, or of four if it would be the first or the last of them.

        By the steps until the target; those of ddp, and of what does not reach it, by the end.
        """
        if self.like is not None:
            return self.like.best(recipe)

        def rank(rate: float) -> tuple[float, float]:
            losses = self.run(recipe, rate).losses
            steps = inf if recipe == DDP else needed(losses, self.targets[0])
            return steps, losses[-1] if losses[-1] > 0 else inf

        low, middle, high = RATES[self.task.name]
        best = min((low, middle, high), key=rank)
        beyond = {low: low * low / middle, high: high * high / middle}
        return min(best, beyond[best], key=rank) if best in beyond else best

    def course(self, recipe: str, seed: int = 0) -> Course:
        return self.run(recipe, self.rates[recipe], seed, self.most)

    def steps(self, recipe: str, seed: int = 0) -> float:
        return needed(self.course(recipe, seed).losses, self.targets[seed])

    def worth(self, recipe: str) -> Effect:
        """What its steps are worth: those of ddp divided by its own, seed by seed; 0: no end."""
        if self.steps(recipe) == inf:
            return Effect(0.0, "x")
        seeds = range(self.runs.seeds)
        factors = [self.steps(DDP, seed) / self.steps(recipe, seed) for seed in seeds]
        return Effect.mean(factors, "x") if min(factors) else Effect(0.0, "x")

    def recipe(self, method: str, link: str) -> str:
        """The better of the method's two, with the first seed."""
        return min(self.methods[method], key=lambda r: self.steps(r) * self.seconds[r, link])

    def sooner(self, method: str, link: str) -> Effect:
        """The factor over ddp."""
        recipe = self.recipe(method, link)
        faster, worth = self.seconds[DDP, link] / self.seconds[recipe, link], self.worth(recipe)
        return Effect(faster * worth.size, "x", faster * worth.error)
