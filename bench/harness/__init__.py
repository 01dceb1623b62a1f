"""What all benchmarks share.

A benchmark declares itself (``bench``), and a function that measures becomes its ``command``, whose
result is reported, drawn into tables and held against claims: the names below. Its engines:

- time: ``training`` lets methods train in turns on emulated nodes (``attached`` is a model under a
  method, ``gpt`` and ``pause`` are models), ``step_times`` records runs one after the other, and
  ``turns`` times any functions in turns;
- accuracy over seeds: ``seeds`` trains a ``case`` in threads or on emulated nodes, ``rows`` dozens
  of workers as rows of one tensor; ``text`` has windows of characters;
- growth over size: ``growth``;
- memory: ``resident``.
"""

from bench.harness.bench import Bench
from bench.harness.claim import GOAL, Claim
from bench.harness.command import Result, command, numbers
from bench.harness.console import console
from bench.harness.effect import NEAR, Effect

__all__ = [
    "GOAL", "NEAR", "Bench", "Claim", "Effect", "Result", "command", "console", "numbers",
]  # fmt: skip
