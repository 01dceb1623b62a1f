"""Two threads never lose to one, and gain in long runs.

The paper's problem, words by Zipf's law and dense rows. A run is `AsyncAdamClassifier.fit`, which
starts fewer threads where each would have little to do or they would be slower than one. Runs take
turns; ratios are medians over turns.
"""

from collections.abc import Callable
from functools import partial
from statistics import median_high

from bench.async_adam.sparse_problem import L2, Problem, generate, words
from bench.harness import Bench, Claim, Result, command
from bench.harness.turns import in_turns, over
from offbeat.hogwild import AsyncAdamClassifier

GAIN = 1.6  # of two threads, in long runs with a million features
LOSS = 0.97  # of one thread's speed, that two may take at worst: noise of the machine
HEADINGS = ("rows", "passes", "1 thread, ms", "2 threads, ms", "threads chosen", "x 1 thread")
BENCH = Bench(name="async_adam/threads", minutes=2, full_minutes=6)
CASES: tuple[tuple[str, Callable[[], Problem], tuple[int, ...], int], ...] = (
    # passes of a run, and turns
    ("the paper's", generate, (1, 10, 400), 9),
    ("47,236 words", lambda: words(20_000, 47_236), (1, 5, 150), 9),
    ("a million words", lambda: words(200_000, 1_000_000), (1, 24), 4),
    ("dense, 256 features", lambda: generate(1.0, n=2000, d=256), (1, 800), 9),
)


def measured(problem: Problem, passes: int, turns: int) -> tuple[list[float], list[float], int]:
    """Seconds of one thread and two by turn, of which the first compile; and how many started."""
    settings = {"l2": L2, "max_iter": passes, "tol": None, "random_state": 0}
    models = {threads: AsyncAdamClassifier(n_jobs=threads, **settings) for threads in (1, 2)}
    chosen: dict[int, list[int]] = {1: [], 2: []}

    def run(threads: int) -> None:
        model = models[threads].fit(problem.x, problem.y)
        chosen[threads].append(model.descent_.fastest or 1)

    found = in_turns({threads: partial(run, threads) for threads in models}, turns, warm_up=1)
    return found[1], found[2], median_high(chosen[2])


@command(BENCH, "--full", full={"times": 3}, times="The usual number of runs.")
def app(times: int = 1) -> Result:
    rows, gains, found = [], {}, {}
    for name, build, every, turns in CASES:
        problem = build()
        for passes in every:
            one, two, started = found[name, passes] = measured(problem, passes, turns * times)
            gain = gains[name, passes] = over(one, two)
            ms = (f"{1e3 * min(each):.1f}" for each in (one, two))
            rows.append((name, f"{passes}", *ms, f"{started}", f"{gain:.2f}"))
    slowest, long = min(gains, key=gains.__getitem__), ("a million words", 24)
    least, gain = gains[slowest], gains[long]
    claims = [
        Claim("two threads never lose to one", "1.00 x",
              f"{least:.2f} x ({slowest[0]}, {slowest[1]} passes)", least >= LOSS),
        Claim(f"a million features, runs of {min(found[long][0]):.1f} s", f"{GAIN} x",
              f"{gain:.2f} x", gain >= GAIN),
    ]  # fmt: skip
    title = "One thread and two, shared moments, float32"
    return Result(title, HEADINGS, rows, claims)
