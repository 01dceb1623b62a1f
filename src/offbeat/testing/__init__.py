"""Worlds of threads for tests, and thousands of virtual workers in one process."""

from offbeat.testing.thread_world import ThreadWorld, simulate, snapshot

__all__ = ["ThreadWorld", "simulate", "snapshot"]
