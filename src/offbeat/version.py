"""The version of the package, which all ranks of a run must share."""

__version__ = "0.1.0"
