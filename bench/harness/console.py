"""The console that all benchmarks print to."""

from rich.console import Console

console = Console(highlight=False)
