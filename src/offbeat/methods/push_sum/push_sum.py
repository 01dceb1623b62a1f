"""SGP and Overlap SGP: each participant sends a share of its model to the peers of this step."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, final

from offbeat.exchange import ParameterExchange, Site, empty_slices
from offbeat.exchange.guard import Guard, Nonfinite
from offbeat.exchange.interface import OnLoss
from offbeat.functional import Layout, flat_view
from offbeat.kernels.dispatch import push_sum_passes
from offbeat.methods.push_sum.bound import BoundPushSum
from offbeat.methods.push_sum.gossip import gossip_round
from offbeat.methods.push_sum.graphs import (
    agree_on_graphs,
    require_shrinking,
    warn_of_small_weights,
)
from offbeat.settings import at_least, check_settings
from offbeat.topology.families import Exponential
from offbeat.topology.graph import Topology, keeps_weights, neighbours, validate


@final
@dataclass(frozen=True, kw_only=True)
class PushSum(ParameterExchange):
    r"""Gossips models, de-biased by a weight that is sent too (SGP and Overlap SGP).

    .. math::
        x_i &= w_i z_i^{anchor} + (z_i - z_i^{anchor}) \\
        x_i &\leftarrow p_{ii} x_i + \sum_j p_{ij} x_j, \quad
        w_i \leftarrow p_{ii} w_i + \sum_j p_{ij} w_j, \quad z_i = x_i / w_i

    The mixing shares p come from ``topology``. Every message contains its share of the weight, so
    that irregular graphs converge to the true mean as well.

    Args:
        topology: which participant sends to which in every exchange.
        over: "world" for ranks as participants, "node" for nodes: then each local rank exchanges
            its slice of the model with its counterparts.
        overlap: the paper's tau. 0 sends after every step and waits for the messages of the same
            step. tau >= 1 sends every tau steps without waiting, and adds each message exactly
            tau steps after it was sent; a step blocks only if the message has not arrived by
            then. Mass in flight is missing from x and w alike.
        every: without overlap, steps between two exchanges: one follows when (k+1) mod every = 0,
            after k earlier steps. Participants go on alone in between.
        wire: "bf16" halves the bytes; the error of the cast stays with the sender, so that no
            mass is lost.
        biased: use x as the model and ignore w: the paper's ablation (Table 4).
        weighted_updates: add :math:`w_i (z_i - z_i^{anchor})`, so that the model moves by what the
            optimizer did to it. Unscaled, as in the paper, it moves by 1/w of that, 1.5 times as
            far with one peer and overlap, and 200 times where a directed graph leaves a
            participant a weight of 0.005. A warning at the attach says so of weights below 0.2.
            With it the average moves by :math:`w_i / n` of an update, and not by 1/n: data of
            participants with small weights count for less. One more pass over memory.
        nonfinite: "raise" makes parameters of a rank that are not finite before an exchange the
            same error on all ranks; those of that rank are averaged in part by then. "skip" lets
            that rank return to those after its step before, in any step, and gossip them; a second
            time in a row is an error. For one more model of memory.

    Bytes sent per exchange: one model for every peer (half with "bf16"; one slice, plus a gather
    inside the node, between nodes) and 16 more. Extra memory: one message for each different
    share and one for each sender, twice under overlap; an anchor where weights vary, and for
    16-bit parameters always, in float32: it holds what their rounding takes (``biased`` has none);
    one more model between nodes. Passes over memory: two, one before the wait for messages and
    one after the next ones are sent; one where the last message had arrived when it was needed;
    two more between nodes. On a CPU with numba the passes are machine code where there is an
    anchor of the parameters' dtype.
    ``sum x`` and ``sum w``, mass in flight included, are conserved up to rounding.

    In an elastic run the survivors of a lost rank discard what is in flight and start anew from
    their models, x = z and w = 1, on the same graphs for fewer ranks: they converge to the mean of
    these models. Over "node" the first rank of each node exchanges the whole model, and copies it
    to the others.

    Source: Assran et al. 2019, Algorithms 1 and 2; there the update is a plain SGD step, here it
    is whatever the optimizer did to the parameters. The delay is exactly tau (caption of Table 4),
    not at most tau, so that runs can be repeated bit for bit.
    """

    topology: Annotated[Topology, "such as Ring()"] = field(default_factory=Exponential)
    over: Literal["world", "node"] = "world"
    overlap: Annotated[int, at_least(0, "steps")] = 0
    every: Annotated[int, at_least(1, "steps")] = 1
    wire: Literal["bf16"] | Annotated[None, "full precision"] = None
    biased: bool = False
    weighted_updates: bool = False
    nonfinite: Nonfinite = "raise"
    on_loss: ClassVar[OnLoss] = "anew"  # from the models of the survivors

    def __post_init__(self) -> None:
        check_settings(self)
        if self.overlap and self.every > 1:
            raise ValueError(
                f"every={self.every} with overlap={self.overlap}: under overlap the next message "
                "is sent when the last one is due; use overlap alone, or overlap=0"
            )
        if self.weighted_updates and self.biased:
            raise ValueError(
                "weighted_updates=True with biased=True: there is no weight to scale with; leave "
                "out one of them"
            )

    @property
    def takes_weights(self) -> bool:
        """Whether messages have weights, which those of ranks become a part of."""
        return not self.biased

    def peers(self, site: Site) -> Collection[int] | None:
        """Check the graphs for this world on all ranks alike, and return the neighbours in them."""
        if site.size == 1:  # alone until another one joins
            return ()
        validate(self.topology, site.size)
        if site.is_elastic and not site.world.lost:
            require_shrinking(self.topology, site.size)
        agree_on_graphs(self.topology, site)
        return neighbours(self.topology, site.rank, site.size)

    def bind(self, site: Site) -> BoundPushSum:
        """Allocate the messages."""
        layout = Layout.of(site.parameters, site.slices)
        in_place = site.inside is None and all(
            p.device == site.device and flat_view(p) is not None for p in site.parameters.values()
        )
        flat = None if in_place else layout.empty(site.device, site.chunks)
        empty = [site.slice(f).clone() for f in flat or layout.empty(site.device)]
        keeps = not self.overlap and keeps_weights(self.topology, site.size)
        varies = not keeps or site.weights is not None or layout.is_rounded
        anchor = empty_slices(site, layout) if varies and not self.biased else None
        rounds = []
        if site.group is not None:
            given = self.topology, site.group, empty, self.wire
            rounds = [gossip_round(*given) for _ in range(2 if self.overlap else 1)]
        # Where whole nodes may be lost, the world of the first ranks is one of nodes.
        as_nodes = site.is_elastic and self.over == "node"
        guard = Guard.of(site, self.nonfinite, unit="node" if as_nodes else "rank")
        bound = BoundPushSum(
            site,
            layout,
            flat,
            anchor,
            rounds,
            push_sum_passes(site.device),
            guard,
            topology=self.topology,
            overlap=self.overlap,
            every=max(self.every, self.overlap),
            biased=self.biased,
            weighted_updates=self.weighted_updates,
        )
        bound.reset()
        if anchor is not None and not self.weighted_updates:
            warn_of_small_weights(self.topology, site, self.overlap)
        return bound

    def growth_fault(self, size: int) -> str | None:
        """Return why ``size`` participants could not exchange on these graphs, or None."""
        if self.biased:
            return "biased=True takes the numerator as the model, of which nobody can give half"
        try:
            validate(self.topology, size)
        except ValueError as fault:
            return str(fault)
        return None
