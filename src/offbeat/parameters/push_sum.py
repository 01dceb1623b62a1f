"""Push-sum gossip: each participant sends a share of itself to its peers of the moment."""

from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from offbeat.collectives import broadcast, exchange
from offbeat.exchange import ParameterExchange, Saved, Site
from offbeat.functional import Layout, de_bias, mix, numerator, pack
from offbeat.topology import OnePeerExponential, Peers, Topology, keeps_weights, validate


@dataclass(eq=False)
class PushSumState:
    """What :class:`PushSum` knows of one replica.

    ``flat`` holds the numerator x, and ``anchor`` the model z before the optimizer step; where
    every weight stays 1 no anchor is needed and none is stored. ``outbox`` and ``inbox`` are the
    messages of one exchange, allocated once for the busiest exchange of a period.
    """

    site: Site
    layout: Layout
    flat: list[Tensor]
    views: dict[str, Tensor]
    anchor: list[Tensor] | None
    outbox: list[list[Tensor]]
    inbox: list[list[Tensor]]
    weight: float = 1.0
    sends: int = 0


@final
@dataclass(frozen=True)
class PushSum(ParameterExchange[PushSumState]):
    r"""Stochastic Gradient Push: gossip after every optimizer step, de-biased by its weight.

    .. math::
        x_i &= w_i z_i^{anchor} + (z_i - z_i^{anchor}) \\
        x_i &\leftarrow p_{ii} x_i + \sum_j p_{ij} x_j, \quad
        w_i \leftarrow p_{ii} w_i + \sum_j p_{ij} w_j, \quad z_i = x_i / w_i

    The mixing shares p come from ``topology``; every message carries its share of the weight, so
    that irregular graphs too converge to the true mean. ``over="node"``: nodes are the
    participants, each local rank exchanges its slice of the model with its counterparts.

    Bytes sent per step: the model's for every peer of the moment (its slice, plus a gather inside
    the node) and 16 more. Extra memory: the numerator, one message for each different share, one
    for each sender, and an anchor where weights vary. Passes over memory with one peer: pack,
    scale, mix, unpack. ``sum x`` and ``sum w`` are conserved up to rounding.

    Source: Assran et al. 2019, Algorithm 1; there the update is a plain SGD step, here it is
    whatever the optimizer did to the parameters.
    """

    topology: Topology = field(default_factory=OnePeerExponential)
    over: Literal["world", "node"] = "world"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if not isinstance(self.topology, Topology):
            raise ValueError(
                f"topology={self.topology!r}, expected an offbeat.Topology such as Ring()"
            )
        if self.over not in ("world", "node"):
            raise ValueError(f"over={self.over!r}, expected 'world' or 'node'")

    def init(self, site: Site) -> PushSumState:
        """Check the graphs for this world and allocate the numerator."""
        validate(self.topology, site.size)
        layout = Layout.of(site.parameters, site.slices)
        flat = layout.empty(site.device, site.chunks)
        anchored = not keeps_weights(self.topology, site.size)
        anchor = layout.empty(site.device, site.chunks) if anchored else None
        rounds = [
            self.topology.peers(site.rank, site.size, index)
            for index in range(self.topology.period(site.size))
        ]
        outbox = _messages(site, flat, max(len({s for _, s in peers.send}) for peers in rounds))
        inbox = _messages(site, flat, max(len(peers.receive) for peers in rounds))
        state = PushSumState(site, layout, flat, layout.views(flat), anchor, outbox, inbox)
        self.settle(state)
        return state

    def step(self, state: PushSumState, step: int) -> None:
        """Exchange with the peers of this step."""
        site = state.site
        self.mass(state)
        if site.group is not None:
            peers = self.topology.peers(site.rank, site.size, state.sends)
            state.weight = _gossip(state, peers)
        site.gather(state.flat)
        if state.anchor is not None:
            _share_weight(state)
        state.sends += 1
        de_bias(state.flat, state.weight)
        pack(site.parameters.values(), state.views.values())
        if state.anchor is not None:
            pack(state.anchor, state.flat)

    def mass(self, state: PushSumState) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """The numerator of the parameters as they are, and the weight."""
        pack(state.views.values(), state.site.parameters.values())
        if state.anchor is not None:
            numerator(state.flat, state.anchor, state.weight)
        return state.flat, state.views, state.weight

    def settle(self, state: PushSumState) -> None:
        """Start anew from equal replicas: anchor = parameters, w = 1."""
        state.weight = 1.0
        if state.anchor is not None:
            anchors = state.layout.views(state.anchor)
            pack(anchors.values(), state.site.parameters.values())

    def staleness(self, state: PushSumState, step: int) -> int:
        """Zero: every step waits for the messages of the same step."""
        return 0

    def save(self, state: PushSumState) -> Saved:
        """Weight, phase of the graph, and the anchor where there is one."""
        saved: Saved = {"weight": state.weight, "sends": state.sends}
        if state.anchor is not None:
            anchors = state.layout.views(state.anchor)
            saved["anchor"] = {name: anchor.clone() for name, anchor in anchors.items()}
        return saved

    def load(self, state: PushSumState, saved: Saved) -> None:
        """Take over weight, phase and anchor."""
        state.weight, state.sends = float(saved["weight"]), int(saved["sends"])
        if state.anchor is not None:
            anchors = state.layout.views(state.anchor)
            pack(anchors.values(), [saved["anchor"][name] for name in anchors])


def _gossip(state: PushSumState, peers: Peers) -> float:
    """One round of push-sum on this rank's slice; returns the new weight."""
    group = state.site.group
    assert group is not None, "only ranks with partners gossip"
    mine = [state.site.slice(flat) for flat in state.flat]
    shares = dict.fromkeys(share for _, share in peers.send)
    scaled = dict(zip(shares, state.outbox, strict=False))  # one copy for each different share
    for share, message in scaled.items():
        for x, out in zip(mine, message, strict=True):
            torch.mul(x, share, out=out)
    sends, receives = [], []
    for to, share in peers.send:
        head = _header(state, state.weight * share)
        sends += [(to, tensor) for tensor in (head, *scaled[share])]
    arrivals = [(_header(state, 0.0), body) for body in state.inbox[: len(peers.receive)]]
    for source, (head, body) in zip(peers.receive, arrivals, strict=True):
        receives += [(source, tensor) for tensor in (head, *body)]
    exchange(sends, receives, group).wait()
    for x, *messages in zip(mine, *(body for _, body in arrivals), strict=True):
        mix(x, peers.keep, messages)
    for source, (head, _) in zip(peers.receive, arrivals, strict=True):
        if int(head[1]) != state.sends:
            raise group.heartbeat.condemn(
                ValueError(
                    f"rank {group.ranks[source]} is at exchange {int(head[1])} but rank "
                    f"{group.ranks[group.rank]} at {state.sends}; call step() equally often on all"
                )
            )
    return peers.keep * state.weight + sum(float(head[0]) for head, _ in arrivals)


def _messages(site: Site, flat: list[Tensor], count: int) -> list[list[Tensor]]:
    if site.group is None:
        return []
    return [[torch.empty_like(site.slice(part)) for part in flat] for _ in range(count)]


def _share_weight(state: PushSumState) -> None:
    # Ranks without partners of their own must de-bias with the node's weight too.
    if state.site.inside is not None:
        weight = torch.tensor([state.weight], dtype=torch.float64, device=state.site.device)
        broadcast(weight, 0, state.site.inside).wait()
        state.weight = float(weight)


def _header(state: PushSumState, weight: float) -> Tensor:
    head = [weight, float(state.sends)]
    return torch.tensor(head, dtype=torch.float64, device=state.site.device)
