"""One comparison, from its start to its files."""

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from rich.console import Console

from offbeat.compare.experiment import Experiment
from offbeat.compare.progress import view
from offbeat.compare.report import write_report
from offbeat.compare.result import Comparison, Setup
from offbeat.compare.run import Run, carry_out
from offbeat.compare.summary import summarize
from offbeat.compare.table import table
from offbeat.compare.timeline import timelines
from offbeat.lab import Runner

RECORDINGS, JSON, REPORT = "recordings", "compare.json", "report.html"


@final
@dataclass
class Session:
    """A plan, and what has come of it in ``folder``. What it has to say goes to ``console``."""

    plan: Experiment
    folder: Path
    console: Console
    runs: list[Run] = field(default_factory=list)
    setup: Setup | None = None

    def carry_out(self, place: Runner, unshaped: str | None) -> None:
        """Run everything in ``place``; ``unshaped`` says why its network is none to speak of.

        Raises ValueError if the folder cannot be made.
        """
        self._make_folder()
        self.setup = _setup(self.plan, place, unshaped)
        if unshaped is not None:
            self.console.print(unshaped, markup=False, highlight=False, soft_wrap=True)
        with view(self.plan, self.console).shown() as watch:
            carry_out(self.plan, place, self.folder / RECORDINGS, self.runs, watch)

    def write(self, report: bool) -> Comparison | None:
        """Write what is known into the folder; None if nothing has begun."""
        if self.setup is None:
            return None
        comparison = summarize(self.plan, self.setup, self.runs)
        (self.folder / JSON).write_text(comparison.to_json() + "\n", encoding="utf-8")
        if report:
            write_report(comparison, timelines(self.plan, self.runs), self.folder / REPORT)
        return comparison

    def show(self, comparison: Comparison) -> None:
        """Print the table to standard output, and where the files are."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=500)  # a file has no edge at which a table must fold
        console.print(table(comparison, console.width))
        for name in (JSON, REPORT):
            if (path := self.folder / name).exists():
                console.print(str(path), markup=False, highlight=False, soft_wrap=True)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"out: got {str(self.folder)!r}, which cannot be made ({error.strerror}); name a "
                "folder, or one that does not exist yet"
            ) from error


def _setup(plan: Experiment, place: Runner, unshaped: str | None) -> Setup:
    software = f"torch {torch.__version__}, Python {platform.python_version()}"
    return Setup(
        script=plan.script.name,
        arguments=plan.arguments,
        ranks_per_node=place.world.per_node,
        rate=place.rate,
        unshaped=unshaped,
        started=time.strftime("%Y-%m-%d %H:%M"),
        software=f"{software}, {os.cpu_count()} cores",
    )
