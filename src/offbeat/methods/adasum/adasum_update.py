"""Adasum of the optimizers' updates since the last exchange."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch

from offbeat.exchange import (
    ParameterExchange,
    Site,
)
from offbeat.exchange.guard import Nonfinite
from offbeat.exchange.interface import OnLoss
from offbeat.functional import Layout
from offbeat.methods.adasum.bound import BoundAdasum
from offbeat.methods.adasum.method import Method, build_reduction
from offbeat.methods.adasum.participants import Participants
from offbeat.methods.adasum.slice_layout import SliceLayout
from offbeat.methods.adasum.touched_rows import TouchedRows
from offbeat.settings import at_least, check_settings


@final
@dataclass(frozen=True, kw_only=True)
class AdasumUpdate(ParameterExchange):
    r"""Add updates where they are orthogonal, average them where they are parallel.

    .. math::
        u_i = x_i - a, \quad x_i \leftarrow a \leftarrow a + AS(u_0, \ldots, u_{n-1})
        \quad \text{if } (k+1) \bmod every = 0

    a is the model after the last exchange, u the change by the optimizer since then; AS acts
    on each parameter tensor by itself, see :func:`offbeat.functional.adasum` and
    :func:`offbeat.functional.tree`. All ranks hold the same model after an exchange, bit for bit;
    with "gather" where their processors are of one kind. A rank whose optimizer skipped its step
    contributes a zero update, which leaves those of the others unchanged.

    ``method`` is the communication algorithm: "gather" (small models), "gram" (one round to each
    other rank, twice), "rvhdd" (the paper's), or "auto", the faster one as measured. ``wire``
    rounds messages to 16 bits; the rounding error is added to the next update. "fp16" scales every
    layer by a power of two, so that small updates do not vanish. ``over="node"``: nodes are the
    participants.

    ``partition`` (over "node"): each rank of a node steps its own share of the layers, whole ones
    (:meth:`offbeat.Site.owners`), which are exchanged between the owners of the same layers. Every
    step then broadcasts the parameters inside the node. A node sends as many times the largest
    share as it has ranks. Anchor, update and rows are those of the share.

    Of embeddings with sparse gradients only the rows that some participant has changed are sent,
    over "world" in full precision: the others are zero in all updates, and in the result.

    An update that is not finite is an error on all ranks alike, before anything is changed; with
    ``nonfinite="skip"`` all ranks return to the anchor instead and continue. A second time in a row
    that is due to the same rank is an error: what its optimizer keeps is not finite either.

    Bytes sent per exchange: 2 (n-1)/n of the model's (of half of it with 16 bits), as an
    all-reduce, and inner products. "gram" sends 8 n^2 a layer to the first rank, which sends the
    sum to n-1 others, up to 128 KiB in all; beyond, by an all-reduce. "rvhdd" sends 32 a layer to
    1, 2, ... log2 n others, 1.8 KB a layer between 1,000. "auto" takes "gram" up to those 128 KiB
    between fewer than 16; else "rvhdd" between 2, 4, 8, ... participants, and up to 2 MiB between
    any number; in other numbers, and with 16 bits on the wire or in memory, "gram". From 8
    participants on it takes "rvhdd" too where "gram" would send more than that does in full
    precision, and more than 2.05 times what is sent of the model. The sum is at most 2.05 models in
    full precision for up to 1,000 participants, where layers have 36 KB on average. "gather": n-1
    times the model's; "auto" takes it for messages of up to 64 KiB, and 512 KiB to all others. In
    the first exchange of "gather" and "gram" also three numbers to each other rank: kernels are
    used only if all have numba and the same processor, or Triton and the same kind of GPU. Extra
    memory: the anchor (float32 for 16-bit parameters: it holds what their rounding takes), the
    update, and one model of rows ("gather": n); with 16 bits rows of half the size, and 1.5 models
    more, with "gram" 1.5/n beside. Passes over memory: six.

    Source: Maleki et al. 2021, sections 3.3 to 3.5 and 4; weighted for any number of
    participants.
    """

    every: Annotated[int, at_least(1, "steps")] = 1
    wire: Literal["bf16", "fp16"] | Annotated[None, "full precision"] = None
    method: Method = "auto"
    over: Literal["world", "node"] = "world"
    nonfinite: Nonfinite = "raise"
    partition: bool = False
    takes_weights: ClassVar[bool] = True
    starts_equal: ClassVar[bool] = True  # the update counts from the parameters at the attach

    def __post_init__(self) -> None:
        """Check the settings, and the combinations that no exchange supports."""
        check_settings(self)
        if self.partition and self.over != "node":
            raise ValueError(
                "partition=True with over='world': the ranks of a node share the layers; use "
                "over='node'"
            )
        if self.method == "rvhdd" and self.wire is not None:
            raise ValueError(
                f"method='rvhdd' with wire={self.wire!r}: it would round at every level; use "
                "method='gram', which rounds once"
            )

    @property
    def on_loss(self) -> OnLoss | None:
        """Updates are combined again; a lost owner of layers had their optimizer's state."""
        return None if self.partition else "again"

    def bind(self, site: Site) -> "BoundAdasum":
        """Allocate the anchor and the buffers of the exchange."""
        # Every slice is divided again between its participants, into equal shares.
        owners, place = {}, site.inside.rank if site.inside is not None else 0
        if self.partition:
            owners = site.owners()
            layout = Layout.whole(site.parameters, owners, site.slices, site.size)
            mine = {name for name, owner in owners.items() if owner == place}
            held = layout.part(place, site.slices, mine)
        else:
            layout = held = Layout.of(site.parameters, site.slices * site.size)
        room = 0 if self.partition else site.chunks * site.size
        flat, anchor = held.empty(site.device, room), held.wide(site.device, room)
        nested = site.size < site.world.size
        node = site.inside or site.shards
        peers = Participants(site.size, site.group, node, site.slices, nested, place=site.rank)
        part = SliceLayout(layout, peers, place)
        own = flat if self.partition else [site.slice(part) for part in flat]
        whole = self.over == "world" and self.wire is None and site.shards is None
        reduction = (
            TouchedRows(part, own, sorted(site.sparse), self.method)
            if site.sparse and whole and site.group is not None
            else build_reduction(self.method, part, own, self.wire)
        )
        unknown = torch.full((part.layers,), torch.nan, dtype=torch.float64, device="cpu")
        bound = BoundAdasum(
            site,
            layout,
            held,
            owners,
            part,
            flat,
            anchor,
            reduction,
            unknown,
            every=self.every,
            method=self.method,
            wire=self.wire,
            partition=self.partition,
            nonfinite=self.nonfinite,
        )
        bound.reset()
        return bound
