"""Benchmarks of DASO (Coquelin et al. 2021)."""
