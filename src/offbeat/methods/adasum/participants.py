"""The participants of an Adasum, and small sums that are equal on all of them."""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from offbeat.transport.collectives import all_reduce, broadcast
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle
from offbeat.transport.small_sum import SmallSum

# Bytes that the first rank sends at most in a sum through it; a ring sends fewer, in more hops.
SMALL = 2**17


@dataclass(frozen=True, eq=False)
class Participants:
    """The ``size`` participants of an Adasum."""

    size: int
    group: Group | None  # this rank and those with the same slice of every layer; None: receives
    inside: Group | None = None  # the ranks of a node, which hold the other slices
    slices: int = 1  # members of ``inside`` beyond them only receive
    nested: bool = False  # whether some node has several ranks, not necessarily this one
    on_lane: bool = False  # on the group's own thread, and the submitting thread watches
    place: int = 0  # of this rank's participant, which it shares with those inside its node

    @property
    def rank(self) -> int:
        """This rank's place among its counterparts."""
        return self.group.rank if self.group is not None else self.place

    def wait(self, handle: Handle) -> None:
        """Wait for an exchange; watched on the training thread only."""
        if self.on_lane:
            handle.join()
        else:
            handle.wait()

    def end_hop(self, flying: list[Handle]) -> None:
        """Wait for the messages of a hop before those of the next one.

        On far links all leave at once, since each hop would wait for a round trip; ranks need not
        agree.
        """
        while flying and self.group is not None and not self.group.is_far:
            self.wait(flying.pop())

    def total(self, partial: Tensor, over_group: bool = True) -> Tensor:
        """Sum ``partial`` in place over the ranks; the result is equal on all, bit for bit.

        With ``over_group`` counterparts hold different parts of the layers, otherwise the same.
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

    def alike(self, said: str, device: torch.device) -> bool:
        """Return whether ``said`` is equal on all ranks; all call, once for every ``group``."""
        asked = self.group or self.inside
        if asked is None:
            return True
        # A group without those inside its nodes has a topic of its own.
        topic = "all" if self.inside is None else "all, inside nodes too"
        if topic not in asked.alike:
            # Where vectors go: NCCL sends nothing from the host.
            mine = torch.tensor([crc32(said.encode()), 1], dtype=torch.float64, device=device)
            number, count = self.total(mine.clone())
            # A rank whose number is the mean of different numbers would find them equal.
            differs = (number != mine[0] * count).double().view(1)
            asked.alike[topic] = not self.total(differs)
        return asked.alike[topic]

    def prepared(self, partial: Tensor) -> SmallSum | None:
        """Return a prepared sum of ``partial`` as in :meth:`total`, if it is small."""
        group = self.group if self.inside is None else None
        if group is None or not self._is_small(partial, group):
            return None
        return SmallSum(partial, group)

    def _add(self, partial: Tensor, group: Group) -> None:
        if self._is_small(partial, group):
            SmallSum(partial, group).add(self.wait)
        else:
            self.wait(all_reduce(partial, group))

    def _is_small(self, partial: Tensor, group: Group) -> bool:
        # On a lane always: a collective there may fall between two collectives that the caller
        # launches on the same group, at another place on every rank. Messages have tags.
        return self.on_lane or (group.size - 1) * partial.nbytes <= SMALL
