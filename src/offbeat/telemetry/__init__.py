"""Telemetry: the recorder of a replica, the writers of its statistics, and their recordings."""
