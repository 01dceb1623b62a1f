"""Thousands of workers in one process: the equations of the methods, without sockets."""

from offbeat.testing.virtual.workers import VirtualWorkers

__all__ = ["VirtualWorkers"]
