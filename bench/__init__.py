"""Benchmarks: one module for each claim, one folder for each method."""

import sys
from pathlib import Path

# Benches import the models and data of the examples by their plain names.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
