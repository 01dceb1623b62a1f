"""Benchmarks of elastic runs: workers are killed and started again."""
