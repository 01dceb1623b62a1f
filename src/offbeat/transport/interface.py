"""The interface between exchanges and the network."""

from collections.abc import Collection
from typing import Protocol

from offbeat.transport.group import Group
from offbeat.transport.world import Axis, World


class Transport(Protocol):
    """Opens the groups of an exchange.

    :class:`offbeat.transport.links.Links` opens real ones, between the processes of ``world``;
    :class:`offbeat.transport.recorded.RecordedLinks` opens groups that note what would be sent.
    """

    @property
    def world(self) -> World:
        """The layout of ranks on nodes."""

    def open(self, axis: Axis, peers: Collection[int] | None = None) -> Group | None:
        """Open a new group over ``axis``; all ranks must call.

        ``peers``: the members with which this one exchanges messages beside collectives, by their
        number in the group; None for all. Returns None on a rank that would be alone in the group,
        or that is not a member.
        """
