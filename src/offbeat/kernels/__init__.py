"""Machine code for the CPU, compiled by numba, and the choice of what runs where."""
