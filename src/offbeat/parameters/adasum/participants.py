"""Who combines with whom, and how their small sums become equal on all of them."""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce, broadcast
from offbeat.comm.group import Group
from offbeat.comm.handle import Handle
from offbeat.comm.messages import DirectSum

DIRECT = 2**16  # bytes that a rank sends for a sum in one hop; a ring sends fewer, in more hops


@dataclass(frozen=True, eq=False)
class Participants:
    """The ``size`` participants of an Adasum.

    ``group`` joins this rank with its counterparts, which hold the same slice of every layer; it
    is None on a rank that only receives. ``inside`` joins the ranks of a node, which hold the
    other slices; where it has more members than ``slices``, the last ones only receive.
    ``nested``: some node has several ranks, though perhaps not this rank's.
    ``on_lane``: these exchanges run on the group's own thread, and whoever submits them watches.
    """

    size: int
    group: Group | None
    inside: Group | None = None
    slices: int = 1
    nested: bool = False
    on_lane: bool = False

    @property
    def rank(self) -> int:
        """This rank's place among its counterparts."""
        return self.group.rank if self.group is not None else 0

    def wait(self, handle: Handle) -> None:
        """Wait, watched on the training thread only."""
        if self.on_lane:
            handle.join()
        else:
            handle.wait()

    def total(self, partial: Tensor, over_group: bool = True) -> Tensor:
        """Sum what each rank knows of its part of the layers; equal on all, bit for bit.

        ``over_group`` where counterparts hold different parts; otherwise they hold the same.
        """
        # Nodes first: sums inside a node may round differently from node to node, and what is
        # decided from the total (a NaN, a layer to redo) must be decided alike everywhere. The
        # last hop between counterparts makes it so.
        if self.inside is not None:
            self._add(partial, self.inside)
        if self.group is not None:
            if over_group:
                self._add(partial, self.group)
            elif self.nested:
                self.wait(broadcast(partial, 0, self.group))
        if self.inside is not None and self.inside.size > self.slices:
            self.wait(broadcast(partial, 0, self.inside))
        return partial

    def alike(self, said: str) -> bool:
        """Whether all ranks say the same; all call, and are asked once for every ``group``."""
        asked = self.group or self.inside
        if asked is None:
            return True
        # Of a group alone not all those inside its nodes may know.
        topic = "all" if self.inside is None else "all, inside nodes too"
        if topic not in asked.alike:
            mine = float(crc32(said.encode()))
            known = self.total(torch.tensor([mine, 1.0], dtype=torch.float64))
            # One whose number is the mean of different ones would think that all are equal.
            differs = torch.tensor([float(known[0] != mine * known[1])], dtype=torch.float64)
            asked.alike[topic] = not self.total(differs)
        return asked.alike[topic]

    def direct(self, partial: Tensor) -> DirectSum | None:
        """How :meth:`total` sums ``partial``, prepared, if that is one hop."""
        if self.group is None or self.inside is not None or not _is_small(partial, self.group):
            return None
        return DirectSum(partial, self.group)

    def _add(self, partial: Tensor, group: Group) -> None:
        if _is_small(partial, group):
            self.wait(DirectSum(partial, group).start())
        else:
            self.wait(all_reduce(partial, group))


def _is_small(partial: Tensor, group: Group) -> bool:
    return (group.size - 1) * partial.nbytes <= DIRECT
