"""One script under several methods, on one network: what each costs and what it buys.

Methods take turns in rounds, every rank records what it does (:mod:`offbeat.telemetry`), and the
recordings become one table, the same as JSON, and one page of HTML. The command line is
``offbeat compare``.
"""

from offbeat.compare.experiment import Experiment, Method, parse_methods
from offbeat.compare.report import write_report
from offbeat.compare.result import Comparison, Result, Spread
from offbeat.compare.run import Run, carry_out, open_runner
from offbeat.compare.session import Session
from offbeat.compare.summary import summarize
from offbeat.compare.table import table

__all__ = [
    "Comparison",
    "Experiment",
    "Method",
    "Result",
    "Run",
    "Session",
    "Spread",
    "carry_out",
    "open_runner",
    "parse_methods",
    "summarize",
    "table",
    "write_report",
]
