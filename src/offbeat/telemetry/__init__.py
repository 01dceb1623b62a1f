"""Telemetry: the recorder of a replica, writers for its statistics, and a reader of recordings."""
