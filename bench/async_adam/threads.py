"""One thread and two in short and long runs: the paper's problem, words by Zipf's law, dense rows.

A run is `AsyncAdamClassifier.fit`, which starts fewer threads where each would have little to do or
they would be slower than one. Runs take turns; ratios are medians over turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median_high

from rich.progress import track

from bench.async_adam.sparse_problem import L2, Problem, generate, words
from bench.harness import Bench, Claim, Result, command, console
from bench.harness.turns import in_turns, over
from offbeat.hogwild import AsyncAdamClassifier

MILLION, GOAL = "a million words", 1.6
LOSS = 0.97  # of one thread's speed, that two may take at worst: noise of the machine
HEADINGS = ("rows", "passes", "1 thread, ms", "2 threads, ms", "threads chosen", "x 1 thread")
BENCH = Bench(
    name="async_adam/threads",
    claim="Two threads never lose to one, and gain in long runs",
    minutes=2,
    full_minutes=6,
)


CASES: tuple[tuple[str, Callable[[], Problem], tuple[int, ...]], ...] = (  # and passes of a run
    ("the paper's", generate, (1, 10, 400)),
    ("47,236 words", lambda: words(20_000, 47_236), (1, 5, 150)),
    (MILLION, lambda: words(200_000, 1_000_000), (1, 24)),
    ("dense, 256 features", lambda: generate(1.0, n=2000, d=256), (1, 800)),
)


@dataclass(frozen=True)
class Outcome:
    """Seconds of each turn, by the number of threads allowed."""

    name: str
    passes: int
    started: int
    one: list[float]
    two: list[float]

    @property
    def gain(self) -> float:
        """How many times as fast two threads are, the median over turns."""
        return over(self.one, self.two)

    @property
    def row(self) -> tuple[str, ...]:
        ms = (f"{1e3 * min(each):.1f}" for each in (self.one, self.two))
        return self.name, str(self.passes), *ms, str(self.started), f"{self.gain:.2f}"


def measured(name: str, problem: Problem, passes: int, turns: int) -> Outcome:
    """Runs of one and two threads in turns, the first of which compile."""
    settings = {"l2": L2, "max_iter": passes, "tol": None, "random_state": 0}
    models = {threads: AsyncAdamClassifier(n_jobs=threads, **settings) for threads in (1, 2)}
    chosen: dict[int, list[int]] = {1: [], 2: []}

    def run(threads: int) -> None:
        model = models[threads].fit(problem.x, problem.y)
        chosen[threads].append(model.descent_.fastest or 1)

    found = in_turns({threads: partial(run, threads) for threads in models}, turns, warm_up=1)
    return Outcome(name, passes, median_high(chosen[2]), found[1], found[2])


def claims(found: list[Outcome]) -> list[Claim]:
    slowest = min(found, key=lambda each: each.gain)
    long = max((each for each in found if each.name == MILLION), key=lambda each: each.passes)
    return [
        Claim("two threads never lose to one", "1.00 x",
              f"{slowest.gain:.2f} x ({slowest.name}, {slowest.passes} passes)",
              slowest.gain >= LOSS),
        Claim(f"a million features, runs of {min(long.one):.1f} s", f"{GOAL} x",
              f"{long.gain:.2f} x", long.gain >= GOAL),
    ]  # fmt: skip


@command(BENCH, "--full", full="Three times the runs.")
def app(full: bool = False) -> Result:
    """Time one and two threads on each problem."""
    found = []
    for name, build, every in track(CASES, "problems", console=console):
        problem = build()
        for passes in every:
            turns = (4 if name == MILLION else 9) * (3 if full else 1)
            found.append(measured(name, problem, passes, turns))
    title = "One thread and two, shared moments, float32"
    return Result(title, HEADINGS, [each.row for each in found], claims(found), raw=found)
