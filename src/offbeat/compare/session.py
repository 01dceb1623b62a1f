"""A comparison from its start to the files that it writes."""

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
from rich.console import Console

from offbeat.compare.experiment import Experiment
from offbeat.compare.progress import ProgressView
from offbeat.compare.report.page import write_report
from offbeat.compare.report.table import table
from offbeat.compare.report.timeline import timelines
from offbeat.compare.result import Comparison, Setup
from offbeat.compare.run import Run, run_experiment
from offbeat.compare.summary import summarize
from offbeat.kit.terminal import print_line, standard_output
from offbeat.lab import Runner

RECORDINGS, JSON, REPORT = "recordings", "compare.json", "report.html"


@final
@dataclass
class Session:
    """Runs an experiment; ``folder`` is for recordings and results.

    Progress and failures are printed to ``console``.
    """

    experiment: Experiment
    folder: Path
    console: Console
    runs: list[Run] = field(default_factory=list)
    setup: Setup | None = None

    def run(self, runner: Runner, unshaped: str | None) -> None:
        """Run all methods on ``runner``, which must have been entered.

        ``unshaped`` is the reason why the network has no rate limit, None if it has one. Raises
        ValueError if the folder cannot be created.
        """
        self._make_folder()
        self.setup = _describe_setup(self.experiment, runner, unshaped)
        if unshaped is not None:
            print_line(self.console, unshaped)
        with ProgressView(self.experiment, self.console).shown() as view:
            run_experiment(
                self.experiment, runner, self.folder / RECORDINGS, self.runs, view.observe
            )

    def write(self, report: bool) -> Comparison | None:
        """Summarize the runs so far and write compare.json, and report.html if ``report``.

        Returns None if :meth:`run` has not been called.
        """
        if self.setup is None:
            return None
        comparison = summarize(self.experiment, self.setup, self.runs)
        (self.folder / JSON).write_text(comparison.to_json() + "\n", encoding="utf-8")
        if report:
            charts = timelines(self.experiment, self.runs)
            write_report(comparison, charts, self.folder / REPORT)
        else:  # that of an earlier comparison would be shown as one of this
            (self.folder / REPORT).unlink(missing_ok=True)
        return comparison

    def show(self, comparison: Comparison) -> None:
        """Print the table and the paths of the files to standard output."""
        console = standard_output(500)
        console.print(table(comparison, console.width))
        for name in (JSON, REPORT):
            if (path := self.folder / name).exists():
                print_line(console, str(path))

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"out: got {str(self.folder)!r}, which cannot be created ({error.strerror}); pass "
                "a folder, or a path that does not exist yet"
            ) from error


def _describe_setup(experiment: Experiment, runner: Runner, unshaped: str | None) -> Setup:
    software = f"torch {torch.__version__}, Python {platform.python_version()}"
    slow = [f"node {each.node} at {each.fraction:.0%}" for each in experiment.stragglers]
    return Setup(
        script=experiment.script.name,
        arguments=experiment.arguments,
        ranks_per_node=runner.cluster.per_node,
        rate=runner.rate,
        unshaped=unshaped,
        started=time.strftime("%Y-%m-%d %H:%M"),
        software=f"{software}, {os.cpu_count()} cores",
        links=", ".join([str(runner.links), *slow]),
    )
