"""The version of the package, which all ranks of a run must share."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("offbeat")
except PackageNotFoundError:  # imported from a source tree that was not installed
    __version__ = "0.0.0+unknown"
