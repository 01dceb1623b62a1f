"""Comparing methods: one training script under several algorithms, on one network.

The methods run in turn, for several rounds. Every rank records its steps
(:mod:`offbeat.telemetry`), and the recordings are summarized as a table, as JSON and as an HTML
report. The command line is ``offbeat compare``.
"""

from offbeat.compare.experiment import Experiment, Method, parse_methods
from offbeat.compare.report.page import write_report
from offbeat.compare.report.table import table
from offbeat.compare.result import Comparison, Result, Spread
from offbeat.compare.run import Run, open_runner, run_experiment
from offbeat.compare.session import Session
from offbeat.compare.summary import summarize

__all__ = [
    "Comparison",
    "Experiment",
    "Method",
    "Result",
    "Run",
    "Session",
    "Spread",
    "open_runner",
    "parse_methods",
    "run_experiment",
    "summarize",
    "table",
    "write_report",
]
