"""Benchmarks of Stochastic Gradient Push (Assran et al. 2019)."""
