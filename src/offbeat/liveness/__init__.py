"""Failure detection: waits that end, and the error that all ranks raise.

``failure`` holds :class:`PeerLost`, and what stands for a heartbeat where there is no store.
``heartbeats`` watch other ranks and decide which one is lost and why, through the client of the
``store``; ``error_context`` replaces errors of torch by ones that name the cause.
"""
