"""The progress of a comparison: bars in a terminal, plain lines elsewhere."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean, median
from typing import Self, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from offbeat.compare import quantity
from offbeat.compare.experiment import Experiment, Method
from offbeat.compare.measure import measure_run
from offbeat.compare.run import Run
from offbeat.telemetry.recording import Recording

POLL_SECONDS = 0.25  # between two reads of the recordings
LINE_SECONDS = 30.0  # between two lines about a run, where there is no terminal


class ProgressView(ABC):
    """A display of the runs of an experiment, updated from their growing recordings."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        """Display the progress of ``experiment`` on ``console``."""
        self.experiment, self.console = experiment, console
        self.steps = experiment.steps  # of a run; without --steps, known after the first run

    @abstractmethod
    def on_start(self, run: Run) -> None:
        """Handle the start of a run."""

    @abstractmethod
    def on_update(self, run: Run, recordings: list[Recording]) -> None:
        """Handle new steps; ``recordings`` are those of the ranks that have completed a step."""

    @abstractmethod
    def on_end(self, run: Run) -> None:
        """Handle the end of a run."""

    @contextmanager
    def shown(self) -> Iterator[Self]:
        """Return a context manager that keeps the display visible during all runs."""
        yield self

    @contextmanager
    def observe(self, run: Run) -> Iterator[None]:
        """Follow the recordings of ``run`` from a thread while the context lasts."""
        # Not the other way round, with the run in the thread: ranks are tied to the thread that
        # has started them, and Ctrl-C is raised in the main thread.
        stop = threading.Event()
        thread = threading.Thread(target=self._poll, args=(run, stop), name="offbeat-compare")
        self.on_start(run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.on_end(run)
            if run.failure:
                self._show_failure(run)

    def _poll(self, run: Run, stop: threading.Event) -> None:
        known: dict[str, Recording] = {}
        while not stop.wait(POLL_SECONDS):
            for path in run.folder.glob("rank*.jsonl"):
                known.setdefault(path.name, Recording(path)).update()
            begun = [recording for recording in known.values() if recording.steps]
            if begun:
                self.on_update(run, begun)

    def _show_failure(self, run: Run) -> None:
        print_line = self.console.print
        print_line(f"[bold red]{escape(run.method.text)} failed[/]: {run.failure}; last lines:")
        for line in run.last_lines:
            print_line(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@final
class ProgressBars(ProgressView):
    """One progress bar per method, over all its rounds."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        """Create the bars; :meth:`shown` displays them."""
        super().__init__(experiment, console)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._tasks: dict[Method, TaskID] = {}
        self._done = dict.fromkeys(experiment.methods, 0)  # steps of earlier rounds

    def on_start(self, run: Run) -> None:
        """Mark the run as starting."""
        self._show(run, 0, "starting")

    def on_update(self, run: Run, recordings: list[Recording]) -> None:
        """Advance the bar to the steps that all ranks have completed."""
        steps = min(len(recording.steps) for recording in recordings)
        self._show(run, steps, f"step {steps}{_out_of(self.steps)}  {_latest_steps(recordings)}")

    def on_end(self, run: Run) -> None:
        """Show the measurements of the run beside its bar."""
        steps, text = _run_summary(run)
        self.steps = self.steps or steps
        self._done[run.method] += steps
        self._show(run, 0, text)

    def _show(self, run: Run, steps: int, text: str) -> None:
        state = f"round {run.round}/{self.experiment.rounds}  {text}"
        total = None if self.steps is None else self.steps * self.experiment.rounds
        done = self._done[run.method] + steps
        task = self._tasks[run.method]
        self._progress.update(task, completed=done, total=total, state=escape(state))

    @contextmanager
    def shown(self) -> Iterator[Self]:
        """Return a context manager that draws the bars and leaves their final state."""
        width = max(len(method.text) for method in self.experiment.methods)
        for method in self.experiment.methods:
            name = escape(method.text.ljust(width))
            self._tasks[method] = self._progress.add_task(name, total=None, state="waiting")
        with self._progress:
            yield self


@final
class ProgressLines(ProgressView):
    """A line at the start and the end of a run, and one every half minute in between."""

    _last_line = 0.0  # time.monotonic() of it

    def on_start(self, run: Run) -> None:
        """Print that the run has started."""
        self._print_line(run, "started")

    def on_update(self, run: Run, recordings: list[Recording]) -> None:
        """Print the latest step if the last line is half a minute old."""
        if time.monotonic() - self._last_line > LINE_SECONDS:
            steps = min(len(recording.steps) for recording in recordings)
            text = f"step {steps}{_out_of(self.steps)}, {_latest_steps(recordings)}"
            self._print_line(run, text)

    def on_end(self, run: Run) -> None:
        """Print the measurements of the run."""
        self._print_line(run, _run_summary(run)[1])

    def _print_line(self, run: Run, text: str) -> None:
        self._last_line = time.monotonic()
        line = f"round {run.round}/{self.experiment.rounds}  {run.method.text}: {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def open_view(experiment: Experiment, console: Console) -> ProgressView:
    """Return bars if ``console`` is a terminal, else lines."""
    bars: Callable[[Experiment, Console], ProgressView] = ProgressBars
    return (bars if console.is_terminal else ProgressLines)(experiment, console)


def _out_of(steps: int | None) -> str:
    return "" if steps is None else f"/{steps}"


def _latest_steps(recordings: list[Recording]) -> str:
    """Format the time per step of all ranks' latest steps, and their loss if it is reported."""
    latest = [step for recording in recordings for step in recording.steps[-10:]]
    losses = [step.loss for step in latest if step.loss is not None]
    loss = f"  loss {quantity.loss(fmean(losses))}" if losses else ""
    return f"{quantity.seconds(median(step.seconds for step in latest))}/step{loss}"


def _run_summary(run: Run) -> tuple[int, str]:
    """Return the number of steps of a run, and its measurements as text."""
    recordings = run.recordings()
    if run.failure or not recordings:
        return 0, "failed" if run.failure else "interrupted"
    measures = measure_run(recordings)
    loss = "" if measures.final_loss is None else f"  loss {quantity.loss(measures.final_loss)}"
    ending = "" if run.code == 0 else "  interrupted"
    time_per_step = f"{quantity.seconds(measures.seconds)}/step"
    return measures.steps, f"{measures.steps} steps  {time_per_step}{loss}{ending}"
