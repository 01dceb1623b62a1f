"""Timed runs of asynchronous Adam with a number of worker threads."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sparse_rows import Labels, Rows

from offbeat.hogwild import AsyncAdamClassifier

Report = Callable[[int, float, float], None]  # completed passes, seconds, loss
POLL = 0.02  # seconds between two reads of the loss


@dataclass(frozen=True)
class Run:
    """One training run: mean training loss of each pass, and when the pass was completed."""

    workers: int
    seconds: list[float]
    loss: list[float]
    updates: int

    def seconds_to(self, loss: float) -> float | None:
        """Return when a pass first had at most this loss; None if there is none."""
        return next((s for s, x in zip(self.seconds, self.loss, strict=True) if x <= loss), None)


def named(workers: int) -> str:
    """Return the name of a run."""
    return f"{workers} worker" + "s" * (workers > 1)


def fit(x: Rows, y: Labels, workers: int, passes: int, lr: float, report: Report) -> Run:
    """Train, and call ``report`` with passes, seconds and loss as passes are completed.

    ``fit`` runs in a second thread, and this one polls ``loss_curve_``.
    """
    model = AsyncAdamClassifier(
        n_jobs=workers,
        learning_rate=lr,
        max_iter=passes,
        tol=None,  # run all passes
        l2=0.0,
        fit_intercept=False,
        random_state=0,
    )
    errors: list[ValueError] = []

    def run() -> None:
        try:
            model.fit(x, y)
        except ValueError as error:
            errors.append(error)

    training, seconds = threading.Thread(target=run, daemon=True), list[float]()
    started = time.perf_counter()
    training.start()
    is_training = True
    while is_training:  # at least once: it may have ended before we look
        training.join(POLL)
        is_training = training.is_alive()
        losses = list(getattr(model, "loss_curve_", ()))
        if fresh := len(losses) - len(seconds):
            seconds += [time.perf_counter() - started] * fresh
            report(len(losses), seconds[-1], losses[-1])
    if errors:
        raise errors[0]
    return Run(workers, seconds, model.loss_curve_, model.n_updates_)
