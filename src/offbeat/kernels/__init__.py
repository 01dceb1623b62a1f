"""CPU kernels compiled by numba, and the choice of the implementation of each operation."""
