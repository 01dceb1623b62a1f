"""The progress of a comparison: bars in a terminal, plain lines elsewhere."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Self, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from offbeat.compare.experiment import Experiment
from offbeat.compare.run import Run
from offbeat.kit import quantity
from offbeat.kit.terminal import print_line
from offbeat.telemetry.recording import Recording, mean_loss

READ_SECONDS = 0.25  # between two reads of the recordings
LINE_SECONDS = 30.0  # between two lines about a run, where there is no terminal


@final
class ProgressView:
    """The runs of an experiment, followed in their growing recordings.

    In a terminal each method has a bar over all its rounds. Elsewhere a line is printed at the
    start and the end of a run, and every half minute in between.
    """

    def __init__(self, experiment: Experiment, console: Console) -> None:
        """Prepare one bar for each method; :meth:`shown` displays them."""
        self.experiment, self.console = experiment, console
        # Of a run; without --steps taken from the first one, if runs are of one length.
        self.steps, self._are_alike = experiment.steps, True
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
        )
        width = max(len(method.text) for method in experiment.methods)
        self._tasks = {
            method: self._bars.add_task(
                escape(method.text.ljust(width)), total=None, state="waiting"
            )
            for method in experiment.methods
        }
        self._done = dict.fromkeys(experiment.methods, 0)  # steps of earlier rounds
        self._last_line = 0.0  # time.monotonic() of it

    @contextmanager
    def shown(self) -> Iterator[Self]:
        """Return a context manager that draws the bars and leaves their final state."""
        with self._bars:
            yield self

    @contextmanager
    def observe(self, run: Run) -> Iterator[None]:
        """Follow the recordings of ``run`` from a thread while the context lasts."""
        # Not the other way round, with the run in the thread: ranks are tied to the thread that
        # has started them, and Ctrl-C is raised in the main thread.
        stop = threading.Event()
        thread = threading.Thread(target=self._follow, args=(run, stop), name="offbeat-compare")
        self._show(run, 0, "starting")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            steps, text = _summary(run)
            if self._are_alike:
                self.steps = self.steps or steps
            self._done[run.method] += steps
            self._show(run, 0, text)
            if run.failure:
                name = f"[bold red]{escape(run.method.text)} failed[/]"
                self.console.print(f"{name}: {run.failure}; last lines:")
                for line in run.last_lines:
                    print_line(self.console, f"  {line}")

    def _follow(self, run: Run, stop: threading.Event) -> None:
        known: dict[str, Recording] = {}
        while not stop.wait(READ_SECONDS):
            for path in run.folder.glob("rank*.jsonl"):
                known.setdefault(path.name, Recording(path)).update()
            begun = [recording for recording in known.values() if recording.steps]
            is_due = time.monotonic() - self._last_line > LINE_SECONDS
            if begun and (is_due or self.console.is_terminal):
                steps = min(len(recording.steps) for recording in begun)
                if self.steps is not None and steps > self.steps:
                    self.steps, self._are_alike = None, False
                out_of = "" if self.steps is None else f"/{self.steps}"
                self._show(run, steps, f"step {steps}{out_of}  {_latest(begun)}")

    def _show(self, run: Run, steps: int, text: str) -> None:
        """Show the steps that all ranks have completed in this round."""
        turn = f"round {run.round}/{self.experiment.rounds}"
        total = None if self.steps is None else self.steps * self.experiment.rounds
        done, state = self._done[run.method] + steps, escape(f"{turn}  {text}")
        self._bars.update(self._tasks[run.method], completed=done, total=total, state=state)
        if not self.console.is_terminal:
            self._last_line = time.monotonic()
            print_line(self.console, f"{turn}  {run.method.text}: {text}")


def _latest(recordings: Sequence[Recording]) -> str:
    """Format the time per step of all ranks' latest steps, and their loss if it is reported."""
    latest = [step for recording in recordings for step in recording.steps[-10:]]
    return _pace(median(step.seconds for step in latest), mean_loss(latest))


def _summary(run: Run) -> tuple[int, str]:
    """Return the number of steps of a run, and its measurements as text."""
    if run.failure or (found := run.measures) is None:
        return 0, "failed" if run.failure else "interrupted"
    ending = "" if run.code == 0 else "  interrupted"
    return found.steps, f"{found.steps} steps  {_pace(found.seconds, found.final_loss)}{ending}"


def _pace(seconds: float, loss: float | None) -> str:
    ending = "" if loss is None else f"  loss {quantity.loss(loss)}"
    return f"{quantity.seconds(seconds)}/step{ending}"
