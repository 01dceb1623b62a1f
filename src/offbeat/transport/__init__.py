"""Groups, collectives and point-to-point messages over ``torch.distributed``.

A :class:`~offbeat.transport.world.World` assigns ranks to nodes. A replica's
:class:`~offbeat.transport.links.Links` open a :class:`~offbeat.transport.group.Group` for each
axis. Every exchange over a group returns a :class:`~offbeat.transport.handle.Handle`, whose waits
end with :class:`~offbeat.liveness.failure.PeerLost` when a rank fails.
"""
