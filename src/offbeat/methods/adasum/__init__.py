"""Adasum (Maleki et al. 2021): adaptive summation of the updates of all ranks."""
