"""What all benchmarks share.

A benchmark declares itself (``Bench``), and a function that measures becomes its ``command``, whose
result is reported, drawn into tables and held against claims. The engines:

- time: ``training`` lets methods train in turns on emulated nodes (``attached`` is a model under a
  method, ``gpt`` and ``pause`` are models), ``step_times`` records runs one after the other, and
  ``turns`` times any functions in turns;
- accuracy over seeds: ``seeds`` trains a ``case`` in threads or on emulated nodes, ``rows`` dozens
  of workers as rows of one tensor; ``text`` has windows of characters;
- growth over size: ``growth``;
- memory: ``resident``.
"""

from bench.harness.catalogue import Bench
from bench.harness.claim import GOAL, NEAR, Claim, Effect, at_least, at_most, less
from bench.harness.command import command, numbers
from bench.harness.files import console
from bench.harness.report import Result

__all__ = [
    "GOAL", "NEAR", "Bench", "Claim", "Effect", "Result", "at_least", "at_most", "command",
    "console", "less", "numbers",
]  # fmt: skip
