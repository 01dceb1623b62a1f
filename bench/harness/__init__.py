"""What all benchmarks share.

A benchmark declares itself (``bench``), and a function that measures becomes its ``command``, whose
result is reported, drawn into tables and held against claims. What is measured on the way:

- time: ``training`` lets methods train in turns on emulated nodes (``attached`` is a model under a
  method, ``gpt`` and ``pause`` are models), ``step_times`` records runs one after the other, and
  ``turns`` times any functions in turns;
- growth over size: ``growth``;
- memory: ``resident``.
"""
