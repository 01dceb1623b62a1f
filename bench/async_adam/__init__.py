"""Benchmarks of Asynchronous Adam (Renda)."""
