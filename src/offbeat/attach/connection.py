"""The connection of a replica: its process groups, heartbeat and collective calls."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch

from offbeat.liveness.failure import PeerLost, Phase
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.transport.group import Group
from offbeat.transport.links import Links
from offbeat.transport.meter import Meter
from offbeat.transport.world import World


def marked(error: Exception) -> Exception:
    """Mark an error that all ``mates`` raise, so that no call around it asks them once more."""
    vars(error)["is_alike"] = True
    return error


class Mates(Protocol):
    """The ranks of a node that are lost, and come back, together."""

    @property
    def is_lost(self) -> bool:
        """Whether one of them is."""

    def concur(self, fault: Exception | None) -> None:
        """Raise on all of them what one has found, a loss if nothing else; all of them call."""

    def close(self) -> None:
        """End their connection."""


@final
@dataclass(frozen=True, eq=False)
class Connection:
    """The links between the ranks of ``world``; None where this rank is the only one.

    ``control`` joins all ranks, ``mates`` those of this node in an elastic run of a sharded model.
    """

    world: World
    links: Links | None
    control: Group | None
    mates: Mates | None = None

    def open(self, pair: Collection[int] = ()) -> "Connection":
        """Return this connection with the control group; all ranks call.

        ``pair``: two ranks that send each other messages in it, beside its collectives.
        """
        if self.links is None:
            return self
        world = self.world
        others = [world.ranks.index(rank) for rank in pair if rank != world.rank]
        control = self.links.open("world", others if world.rank in pair else ())
        return replace(self, control=control)

    @property
    def unit_size(self) -> int:
        """How many ranks, one after the other, are lost and join together: 1 or a node's."""
        return 1 if self.mates is None else len(self.world.nodes[0])

    @property
    def units(self) -> Sequence[Sequence[int]]:
        """The ranks that are lost together; () if each one is lost alone."""
        return () if self.mates is None else self.world.nodes

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The heartbeat of this replica."""
        return self.links.heartbeat if self.links is not None else None

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that has connected."""
        return self.links is not None and self.links.is_inherited

    @property
    def meter(self) -> Meter:
        """The counters to which all exchanges of this replica add."""
        return self.links.meter if self.links is not None else Meter()

    @contextmanager
    def calling(self, verb: str | None) -> Iterator[None]:
        """Mark this rank as inside the collective call ``verb``, if it is one, then as past it."""
        # A rank that waits compares this with its own call: two ranks in different calls would
        # otherwise pair up messages that do not belong together.
        # Evaluations call us in inference mode, and tensors made there cannot be written later.
        normal = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        if self.links is None or verb is None:
            with normal:
                yield
            return
        heartbeat = self.links.heartbeat
        try:
            with normal, heartbeat.verb(verb):
                yield
        except ValueError:
            # All raise it. One that is late to do so must not seem to be in another call than one
            # that is in the next already.
            heartbeat.next_call("")
            raise
        heartbeat.next_call(verb)

    @contextmanager
    def alike(self, is_of_all: bool = True) -> Iterator[None]:
        """End a call alike on this rank and its ``mates``: it returns on all of them, or on none.

        ``is_of_all``: whether all of them make the call. Otherwise a fault ends their next one.
        """
        # Ranks that hold shards of one model wait for each other in every forward. So none may
        # return while another agrees with other nodes on who is left, which wait for this one.
        try:
            yield
        except (ValueError, PeerLost) as error:
            if self.mates is not None and "is_alike" not in vars(error):
                self.mates.concur(error)
            raise
        if is_of_all and self.mates is not None:
            self.mates.concur(None)

    def resume(self, phase: Phase) -> None:
        """Count calls on from ``phase``, that of an earlier connection or of another rank."""
        if self.links is not None:
            self.links.heartbeat.resume(phase)

    def report_error(self, error: Exception) -> Exception:
        """Make ``error`` the agreed error of all ranks, and return the agreed error to raise."""
        return self.links.heartbeat.report_error(error) if self.links is not None else error

    def close(self, ends_run: bool = False) -> None:
        """End the heartbeat, the threads and the process groups; and the run, for all ranks."""
        if self.links is not None:
            if ends_run:
                self.links.end_run()
            self.links.close()
