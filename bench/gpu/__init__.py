"""Kernels and steps on a GPU."""
