"""Two threads reach a loss sooner than one, and than `SGDClassifier`.

Each method at the step size of a grid that needs the fewest passes. The time of a pass of the
first method is that of its fastest run, the others' follow by ratios within turns.
"""

from collections.abc import Iterator

import numpy as np
from sklearn.linear_model import LogisticRegression, SGDClassifier

from bench.async_adam.curves import timed, tuned
from bench.async_adam.methods import Training, adam
from bench.async_adam.sparse_problem import L2, Problem, Vector, generate
from bench.harness import Bench, Claim, Result, command

GRID = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1)
NEAR = (1.05, 1.01)  # of the optimum's loss, to which all are timed
HEADINGS = ("loss", "method", "step size", "passes", "ms a pass", "ms")
BENCH = Bench(name="async_adam/time", minutes=1)


class HeldOut(Problem):
    """The same rows, with the held-out loss as the loss."""

    def loss(self, theta: Vector) -> float:
        z = self.test_x @ theta
        return float(np.mean(np.logaddexp(0, z) - self.test_y * z))


def sgd_classifier(problem: Problem, alpha: float) -> Training:
    """scikit-learn's own; ``alpha`` is a constant step size, or 0 for its default schedule."""
    schedule = {"learning_rate": "constant", "eta0": alpha} if alpha else {}
    model = SGDClassifier(
        loss="log_loss", alpha=L2, fit_intercept=False, random_state=0, **schedule
    )
    x, theta = problem.x.astype(np.float64), np.zeros(problem.x.shape[1])

    def go(count: int) -> None:
        for _ in range(count):
            model.partial_fit(x, problem.y, classes=[0.0, 1.0])
        theta[:] = model.coef_[0]

    return Training("SGDClassifier", alpha, theta, go)


GRIDS = {  # of the methods
    adam(): GRID,
    adam(threads=2): GRID,
    sgd_classifier: (0.0, *GRID),
}


def judged(goal: float, near: float, one: float, two: float, *theirs: float) -> Iterator[Claim]:
    """On milliseconds of one thread and of two, and of SGDClassifier for held-out losses."""
    if not theirs:
        text = f"training loss {goal:.4f} ({near} of the optimum's) sooner with 2 threads"
        yield Claim(text, f"1 thread {one:.2f} ms", f"{two:.2f} ms", two < one)
    for other in theirs:
        for threads, ours in (("1 thread", one), ("2 threads", two)):
            text = f"held-out loss {goal:.4f} sooner than SGDClassifier, {threads}"
            yield Claim(text, f"{other:.2f} ms", f"{ours:.2f} ms", ours < other)


@command(BENCH, "--passes 60", passes="Passes at most.")
def app(passes: int = 30) -> Result:
    problem = generate()
    held_out = HeldOut(problem.x, problem.y, problem.test_x, problem.test_y)
    solver = LogisticRegression(C=1 / (L2 * len(problem.y)), fit_intercept=False, tol=1e-6)
    best = solver.fit(problem.x, problem.y).coef_[0].astype(np.float32)
    ways, claims, rows = list(GRIDS), [], []
    for near in NEAR:
        for kind, of, methods in (("training", problem, ways[:2]), ("held-out", held_out, ways)):
            goal = near * of.loss(best)
            by = lambda curve, goal=goal: curve.passes_to(goal)  # noqa: E731
            curves = [tuned(method, of, passes, GRIDS[method], by) for method in methods]
            curves = timed(curves, methods, of)
            ms = [1e3 * curve.seconds_to(goal) for curve in curves]
            claims += judged(goal, near, *ms)
            rows += [
                (f"{kind} {goal:.4f}", c.label, f"{c.alpha:g}", f"{c.passes_to(goal):.2f}",
                 f"{1e3 * c.pace:.2f}", f"{each:.2f}") for c, each in zip(curves, ms, strict=True)
            ]  # fmt: skip
    title = "Time to a loss, each at its best step size (0: its own schedule)"
    return Result(title, HEADINGS, rows, claims)
