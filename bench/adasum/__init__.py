"""Benchmarks of Adasum (Maleki et al. 2021)."""
