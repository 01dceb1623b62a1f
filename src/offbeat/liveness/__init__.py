"""Failure detection: waits that end, and the error that all ranks raise.

``failure`` is what others see: the interface of detection during waits, and :class:`PeerLost`.
``heartbeats`` watch other ranks and decide which one is lost and why, through the client of the
``store``; ``error_context`` replaces errors of torch by ones that name the cause.
"""
