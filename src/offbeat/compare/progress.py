"""Showing how a comparison goes on: bars in a terminal, plain lines elsewhere."""

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
from offbeat.compare.measure import measure
from offbeat.compare.run import Run
from offbeat.telemetry.recording import Recording

LOOK = 0.25  # seconds between two looks at the recordings
WORD = 30.0  # seconds between two words about a run, where there is no terminal


class View(ABC):
    """Told of every run while its recordings grow."""

    def __init__(self, plan: Experiment, console: Console) -> None:
        """Show the progress of ``plan`` on ``console``."""
        self.plan, self.console = plan, console
        self.steps = plan.steps  # of a run; without --steps, known after the first

    @abstractmethod
    def started(self, run: Run) -> None:
        """A run begins."""

    @abstractmethod
    def moved(self, run: Run, recordings: list[Recording]) -> None:
        """A run goes on; ``recordings`` are those of the ranks that have begun."""

    @abstractmethod
    def ended(self, run: Run) -> None:
        """A run is over."""

    @contextmanager
    def shown(self) -> Iterator[Self]:
        """Entered around all runs."""
        yield self

    @contextmanager
    def following(self, run: Run) -> Iterator[None]:
        """Look at the growing recordings of ``run`` from a thread of our own."""
        # The run needs the calling thread: ranks die with the thread that has started them.
        stop = threading.Event()
        thread = threading.Thread(target=self._look, args=(run, stop), name="offbeat-compare")
        self.started(run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.ended(run)
            if run.failure:
                self._show_failure(run)

    def _look(self, run: Run, stop: threading.Event) -> None:
        known: dict[str, Recording] = {}
        while not stop.wait(LOOK):
            for path in run.folder.glob("rank*.jsonl"):
                known.setdefault(path.name, Recording(path)).update()
            begun = [recording for recording in known.values() if recording.steps]
            if begun:
                self.moved(run, begun)

    def _show_failure(self, run: Run) -> None:
        print_line = self.console.print
        print_line(f"[bold red]{escape(run.method.text)} failed[/]: {run.failure}; last lines:")
        for line in run.last_lines:
            print_line(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@final
class Bars(View):
    """One bar for each method, over all its rounds."""

    def __init__(self, plan: Experiment, console: Console) -> None:
        """Make the bars."""
        super().__init__(plan, console)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._tasks: dict[Method, TaskID] = {}
        self._done: dict[Method, int] = dict.fromkeys(plan.methods, 0)  # steps of earlier rounds

    def started(self, run: Run) -> None:
        """Let its bar say so."""
        self._show(run, 0, "starting")

    def moved(self, run: Run, recordings: list[Recording]) -> None:
        """Fill its bar."""
        steps = min(len(recording.steps) for recording in recordings)
        self._show(run, steps, f"step {steps}{_of(self.steps)}  {_current(recordings)}")

    def ended(self, run: Run) -> None:
        """Leave the numbers of the run beside its bar."""
        steps, words = _outcome(run)
        self.steps = self.steps or steps
        self._done[run.method] += steps
        self._show(run, 0, words)

    def _show(self, run: Run, steps: int, words: str) -> None:
        state = f"round {run.round}/{self.plan.rounds}  {words}"
        total = None if self.steps is None else self.steps * self.plan.rounds
        done = self._done[run.method] + steps
        task = self._tasks[run.method]
        self._progress.update(task, completed=done, total=total, state=escape(state))

    @contextmanager
    def shown(self) -> Iterator[Self]:
        """Draw the bars, and leave them as they are in the end."""
        width = max(len(method.text) for method in self.plan.methods)
        for method in self.plan.methods:
            name = escape(method.text.ljust(width))
            self._tasks[method] = self._progress.add_task(name, total=None, state="waiting")
        with self._progress:
            yield self


@final
class Lines(View):
    """A line when a run starts and ends, and one every half minute in between."""

    _spoke = 0.0

    def started(self, run: Run) -> None:
        """Say so."""
        self._say(run, "started")

    def moved(self, run: Run, recordings: list[Recording]) -> None:
        """Say so from time to time."""
        if time.monotonic() - self._spoke > WORD:
            steps = min(len(recording.steps) for recording in recordings)
            self._say(run, f"step {steps}{_of(self.steps)}, {_current(recordings)}")

    def ended(self, run: Run) -> None:
        """Say what it took."""
        self._say(run, _outcome(run)[1])

    def _say(self, run: Run, words: str) -> None:
        self._spoke = time.monotonic()
        line = f"round {run.round}/{self.plan.rounds}  {run.method.text}: {words}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def view(plan: Experiment, console: Console) -> View:
    """What suits the console."""
    kind: Callable[[Experiment, Console], View] = Bars if console.is_terminal else Lines
    return kind(plan, console)


def _of(steps: int | None) -> str:
    return "" if steps is None else f"/{steps}"


def _current(recordings: list[Recording]) -> str:
    """The latest steps of all ranks: time, and loss if they report it."""
    latest = [step for recording in recordings for step in recording.steps[-10:]]
    losses = [step.loss for step in latest if step.loss is not None]
    loss = f"  loss {quantity.loss(fmean(losses))}" if losses else ""
    return f"{quantity.seconds(median(step.seconds for step in latest))}/step{loss}"


def _outcome(run: Run) -> tuple[int, str]:
    """How many steps a run made, and its numbers in words."""
    recordings = run.recordings()
    if run.failure or not recordings:
        return 0, "failed" if run.failure else "interrupted"
    numbers = measure(recordings)
    loss = "" if numbers.final_loss is None else f"  loss {quantity.loss(numbers.final_loss)}"
    ending = "" if run.code == 0 else "  interrupted"
    words = f"{numbers.steps} steps  {quantity.seconds(numbers.seconds)}/step{loss}{ending}"
    return numbers.steps, words
