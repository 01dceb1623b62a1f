"""The command line ``offbeat``: a file for each command and its options.

Help is shown without importing torch: commands import what they need when they run.
"""

from offbeat.cli.app import app

__all__ = ["app"]
