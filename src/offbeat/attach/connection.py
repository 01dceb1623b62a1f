"""The connection of a replica: its process groups, heartbeat and collective calls."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import final

import torch

from offbeat.liveness.failure import Phase
from offbeat.liveness.heartbeats.heartbeat import Heartbeat
from offbeat.transport.group import Group
from offbeat.transport.links import Links
from offbeat.transport.meter import Meter
from offbeat.transport.world import World


@final
@dataclass(frozen=True, eq=False)
class Connection:
    """The links between the ranks of ``world``; None where this rank is the only one.

    ``control`` joins all ranks, for checks and small values.
    """

    world: World
    links: Links | None
    control: Group | None

    @classmethod
    def over(cls, world: World, links: Links | None, pair: Collection[int] = ()) -> "Connection":
        """Open the control group over ``links``; all ranks call.

        ``pair``: two ranks that send each other messages in it, beside its collectives.
        """
        if links is None:
            return cls(world, None, None)
        others = [world.ranks.index(rank) for rank in pair if rank != world.rank]
        return cls(world, links, links.open("world", others if world.rank in pair else ()))

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
        """Mark this rank as inside the collective call ``verb``, then as past it.

        A rank that waits compares this with its own call: two ranks in different calls would
        otherwise pair up messages that do not belong together. None for a call of this rank alone.
        """
        # Evaluations call us in inference mode, and tensors made there cannot be written later.
        normal = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        if self.links is None or verb is None:
            with normal:
                yield
            return
        with normal, self.links.heartbeat.verb(verb):
            yield
        self.links.heartbeat.next_call(verb)

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
