"""Adasum of embeddings of which a step changes few rows: only these are exchanged."""

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.functional import Layout, pack
from offbeat.methods.adasum.method import Method, build_reduction
from offbeat.methods.adasum.reduction import Reduction, Statistics
from offbeat.methods.adasum.slice_layout import SliceLayout
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group
from offbeat.transport.small_gathers import gather_numbers

NAMING = 0.1  # of the bytes that a whole table sends: the most that naming its rows may take


@final
class TouchedRows(Reduction):
    """Combines of each of ``tables`` the rows that any participant has changed.

    A row that is zero on all of them adds nothing to an inner product and stays zero: the result is
    that of whole tables, under any optimizer. Every exchange finds the rows, and prepares a
    reduction of these and of all other layers: memory while it runs, passes over all tables. There
    are no roundings: an error that is carried would keep a row in all messages once it was changed.

    Bytes sent for each table, beside those of its rows: 8, and 4 (P-1) m for m rows of the
    participant that has changed most. Tables whose rows would take more than a tenth of their bytes
    to name are combined whole.
    """

    def __init__(
        self, layout: SliceLayout, slices: Sequence[Tensor], tables: Collection[str], method: Method
    ) -> None:
        """Prepare for whole models: one slice, on every participant."""
        assert layout.participants.group is not None
        self._group, self._layout, self._method = layout.participants.group, layout, method
        self._updates, self._tables = layout.layout.views(slices), tables
        self._rows: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}
        self._reduction: Reduction | None = None

    def compare(self) -> Statistics:
        """Agree on the rows, and compare them and all other layers."""
        self._rows = self._touched_by_any()
        parts = {
            name: update[self._rows[name]] if name in self._rows else update
            for name, update in self._updates.items()
        }
        peers = self._layout.participants
        layout = Layout.of(parts, peers.size)
        flat = layout.empty(next(iter(parts.values())).device)
        self._parts = layout.views(flat)
        pack(self._parts.values(), parts.values())
        self._reduction = build_reduction(self._method, SliceLayout(layout, peers), flat, None)
        return self._reduction.compare()

    def combine(self) -> None:
        """Combine them; all other rows are zero."""
        assert self._reduction is not None
        self._reduction.combine()
        for name, part in self._parts.items():
            if name in self._rows:
                self._updates[name][self._rows[name]] = part
            else:
                self._updates[name].copy_(part)
        self._rows, self._parts, self._reduction = {}, {}, None

    def _touched_by_any(self) -> dict[str, Tensor]:
        """Return the rows of the tables, ascending, and without those that are exchanged whole."""
        updates = {name: self._updates[name] for name in self._tables}
        mine = {n: update.flatten(1).ne(0).any(1).nonzero()[:, 0] for n, update in updates.items()}
        counts = gather_numbers([len(rows) for rows in mine.values()], self._group)
        most = map(int, map(max, zip(*counts, strict=True)))
        return {
            name: _union(rows, m, self._group)
            for (name, rows), m in zip(mine.items(), most, strict=True)
            if 4 * m < NAMING * 2 * updates[name].nbytes / self._group.size
        }


def _union(mine: Tensor, most: int, group: Group) -> Tensor:
    """Return the rows of all members, ascending; each has ``most`` at most."""
    everyone = torch.full((group.size, most), -1, dtype=torch.int32, device=mine.device)
    everyone[group.rank, : len(mine)] = mine
    if most:
        all_gather(everyone.view(-1), everyone[group.rank], group).wait()
    rows: Tensor = everyone.unique()
    return rows[rows >= 0].long()
