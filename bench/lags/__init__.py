"""Benchmarks of LAGS-SGD (Shi et al. 2020)."""
