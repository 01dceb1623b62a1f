"""Failure detection: heartbeats, the diagnosis of a lost rank, and the error that all ranks raise.

``status_record`` is the one key of the store that every rank reads. ``heartbeat`` and ``ring``
watch other ranks, ``diagnosis`` decides which rank is lost and why, and ``error_context`` replaces
errors of torch by ones that name the cause.
"""
