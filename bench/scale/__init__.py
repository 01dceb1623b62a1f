"""Benchmarks of what changes as the world grows."""
