"""Outer optimizers beside all other methods, and beside the package torchft."""
