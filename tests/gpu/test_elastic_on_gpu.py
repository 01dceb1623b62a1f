"""Elastic runs with parameters on the GPU: threads, and Gloo through the host."""

from test_recipes import *  # noqa: F403  # its tests, which make their models on problems.DEVICE
