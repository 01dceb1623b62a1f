"""Communication: the only room that calls ``torch.distributed``, except for the lab.

A :class:`~offbeat.comm.world.World` assigns ranks to nodes; a replica's
:class:`~offbeat.comm.links.Links` open a :class:`~offbeat.comm.group.Group` for each axis; every
exchange over a group returns a :class:`~offbeat.comm.handle.Handle`, whose waits end with
:class:`~offbeat.comm.failure.PeerLost` when a rank fails.
"""
