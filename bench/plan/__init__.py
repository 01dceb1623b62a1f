"""Benchmarks of the model of time behind ``offbeat plan``."""
