"""Kernels compiled by numba for CPUs, those for GPUs, and the choice among implementations."""
