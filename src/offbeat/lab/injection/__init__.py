"""Faults of a run: stragglers, links that are down and killed ranks."""
