"""The messages of one gossip exchange, from being addressed to being read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.comm.collectives import all_reduce
from offbeat.comm.group import Group
from offbeat.comm.handle import Handle
from offbeat.comm.messages import exchange
from offbeat.exchange import Site
from offbeat.functional import accumulation_dtype, sum_messages
from offbeat.topology.graph import Peers, Topology

WHOLE = slice(None)


@dataclass(eq=False)
class GossipRound:
    """A model's shares on their way out and in, by section of the layout; allocated once.

    Each message has a header of two float64: its share of the weight and the number of the
    exchange. Buffers and handles live until :meth:`wait`. An exchange that is the mean of all
    goes by all-reduce; the own share, which stays, is taken from the sum.
    """

    site: Site
    outbox: list[list[Tensor]]
    inbox: list[list[Tensor]]
    index: int = 0
    peers: Peers | None = None
    is_mean: bool = False
    weight: float = 1.0
    shares: dict[float, int] = field(default_factory=dict)  # how many receivers each has
    head: Tensor = field(default_factory=lambda: torch.zeros(2))
    heads: list[Tensor] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)

    @classmethod
    def delivered(cls, site: Site, parts: list[Tensor], weight: float) -> "GossipRound":
        """What had arrived when a state was saved."""
        return cls(site, [], [parts], heads=[torch.tensor([weight, 0.0], dtype=torch.float64)])

    def address(self, topology: Topology, index: int, weight: float) -> None:
        """Find out whom this exchange goes to, and what share of the weight stays."""
        size = self.site.size
        self.index, self.weight = index, weight
        self.peers = topology.peers(self.site.rank, size, index)
        self.shares = Counter(share for _, share in self.peers.send)
        self.is_mean = topology.is_mean(size, index) and self._exact

    @property
    def _exact(self) -> bool:
        """Whether messages are as precise as numerators: an all-reduce rounds what it sums."""
        return all(
            out.dtype == into.dtype == accumulation_dtype(out.dtype)
            for out, into in zip(self.outbox[0], self.inbox[0], strict=True)
        )

    @property
    def weight_kept(self) -> float:
        """What stays of the weight."""
        _, peers = self._addressed()
        return peers.keep * self.weight

    def outgoing(self, section: int, part: slice) -> list[tuple[float, int, Tensor]]:
        """Of each message its share, its receivers, and a part of its body."""
        shares = self.shares.items()
        return [
            (p, n, out[section][part]) for (p, n), out in zip(shares, self.outbox, strict=False)
        ]

    def post(self) -> None:
        """Let the messages go, and be ready for those of the senders. Does not block."""
        group, peers = self._addressed()
        if self.is_mean:
            body = self.inbox[0]
            for into, out in zip(body, self.outbox[0], strict=True):
                into.copy_(out)
            self.head = self._head(self.weight / self.site.size)
            self.heads = [self.head.clone()]
            self.handles = [all_reduce(part, group) for part in (*self.heads, *body)]
            return
        bodies = dict(zip(self.shares, self.outbox, strict=False))
        sends = [
            (to, part)
            for to, share in peers.send
            for part in (self._head(self.weight * share), *bodies[share])
        ]
        self.heads = [self._head(0.0) for _ in peers.receive]
        receives = [
            (source, part)
            for source, head, body in zip(peers.receive, self.heads, self.inbox, strict=False)
            for part in (head, *body)
        ]
        self.handles = [exchange(sends, receives, group)]

    def wait(self) -> None:
        """Block until all messages have left and arrived; twice does nothing more."""
        if not self.handles:
            return
        while self.handles:
            self.handles.pop().wait()
        if self.is_mean:
            for into, out in zip(
                (*self.heads, *self.inbox[0]), (self.head, *self.outbox[0]), strict=True
            ):
                into.sub_(out)
        group, peers = self._addressed()
        sources = peers.receive[:1] if self.is_mean else peers.receive
        for source, head in zip(sources, self.heads, strict=True):
            index = float(head[1]) / (self.site.size - 1 if self.is_mean else 1)
            if index != self.index:
                raise group.heartbeat.condemn(
                    ValueError(
                        f"rank {group.ranks[source]} is at exchange {index:g} but rank "
                        f"{group.ranks[group.rank]} at {self.index}; call step() equally often "
                        "on all"
                    )
                )

    @property
    def weight_arrived(self) -> float:
        """The sum of the weights of all messages."""
        return sum(float(head[0]) for head in self.heads)

    def arrived(self, section: int, part: slice = WHOLE) -> list[Tensor]:
        """A part of the body of every message that has arrived."""
        return [body[section][part] for body in self.inbox[: len(self.heads)]]

    def total(self, section: int) -> Tensor:
        """The sum of all bodies, as it will be added."""
        bodies = self.arrived(section)
        return (
            sum_messages(bodies, accumulation_dtype(bodies[0].dtype)) if bodies else torch.zeros(())
        )

    def _addressed(self) -> tuple[Group, Peers]:
        assert self.site.group is not None, "only ranks with partners gossip"
        assert self.peers is not None, "address() comes first"
        return self.site.group, self.peers

    def _head(self, weight: float) -> Tensor:
        body = (*self.outbox[0], *self.inbox[0])[0]
        return torch.tensor([weight, self.index], dtype=torch.float64, device=body.device)


def gossip_round(
    topology: Topology, site: Site, parts: Sequence[Tensor], wire: str | None
) -> GossipRound:
    """Room for the busiest exchange of ``topology``; ``parts`` are like the numerators."""
    rounds = [
        part.peers(site.rank, site.size, index)
        for part in topology.parts()
        for index in range(part.period(site.size))
    ]
    bodies = [
        part.to(torch.bfloat16) if wire == "bf16" and part.dtype.itemsize > 2 else part
        for part in parts
    ]

    def room(count: int) -> list[list[Tensor]]:
        return [[torch.zeros_like(body) for body in bodies] for _ in range(max(1, count))]

    shares = max(len({share for _, share in peers.send}) for peers in rounds)
    return GossipRound(site, room(shares), room(max(len(peers.receive) for peers in rounds)))
