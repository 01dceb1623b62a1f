"""Benchmarks of the `ddp()` baseline."""
