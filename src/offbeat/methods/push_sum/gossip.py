"""The messages of one gossip exchange: their buffers, headers and handles."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from offbeat.functional import accumulation_dtype, sum_messages
from offbeat.topology.graph import Peers, Topology, exchanges_of_periods
from offbeat.transport.collectives import all_reduce
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle
from offbeat.transport.messages import exchange

WHOLE = slice(None)


@dataclass(eq=False)
class GossipRound:
    """One gossip exchange of a participant, with buffers that are allocated once.

    A message is a list of flat tensors, one for each section of the layout, and a header of two
    float64, its share of the weight and the number of the exchange. An exchange that is the mean of
    all participants is an all-reduce, from whose sum the participant's own share is subtracted.
    """

    group: Group
    outgoing: list[list[Tensor]]  # one message for each different share
    incoming: list[list[Tensor]]  # one for each sender
    index: int = 0
    peers: Peers = field(init=False)  # of the exchange that has begun
    is_mean: bool = False
    weight: float = 1.0
    shares: dict[float, int] = field(default_factory=dict)  # receivers of each share
    header: Tensor = field(default_factory=lambda: torch.zeros(2, device="cpu"))
    headers: list[Tensor] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers of messages."""
        return [part for message in (*self.outgoing, *self.incoming) for part in message]

    def begin(self, topology: Topology, index: int, weight: float) -> None:
        """Look up the peers of exchange ``index``, whose numerator has the weight ``weight``."""
        self.index, self.weight = index, weight
        self.peers = topology.peers(self.group.rank, self.group.size, index)
        self.shares = Counter(share for _, share in self.peers.send)
        # An all-reduce rounds to the dtype of messages, which must be that of sums.
        is_exact = all(out.dtype == accumulation_dtype(out.dtype) for out in self.outgoing[0])
        self.is_mean = topology.is_mean(self.group.size, index) and is_exact

    @property
    def weight_kept(self) -> float:
        """The share of the weight that stays at this participant."""
        return self.peers.keep * self.weight

    def messages(self, section: int) -> list[tuple[float, int, Tensor]]:
        """Return the share, the number of receivers and the body of every message."""
        shares = self.shares.items()
        return [(p, n, out[section]) for (p, n), out in zip(shares, self.outgoing, strict=False)]

    def launch(self) -> None:
        """Start to send and to receive all messages, without blocking."""
        if self.is_mean:
            body = self.incoming[0]
            for into, out in zip(body, self.outgoing[0], strict=True):
                into.copy_(out)
            self.header = self._header(self.weight / self.group.size)
            self.headers = [self.header.clone()]
            self.handles = [all_reduce(part, self.group) for part in (*self.headers, *body)]
        else:
            self.handles = [self._exchange()]

    def _exchange(self) -> Handle:
        """Make the headers, and send and receive all messages at the same time."""
        # One after the other they would wait for the slowest pair of each turn, and connections
        # that rest for a turn begin with small windows: between two sites 0.9 s in place of 0.4.
        peers = self.peers
        bodies = dict(zip(self.shares, self.outgoing, strict=False))
        sends = [
            [(to, part) for part in (self._header(self.weight * share), *bodies[share])]
            for to, share in peers.send
        ]
        self.headers = [self._header(0.0) for _ in peers.receive]
        receives = [
            [(source, part) for part in (header, *body)]
            for source, header, body in zip(
                peers.receive, self.headers, self.incoming, strict=False
            )
        ]
        return exchange([*chain(*sends)], [*chain(*receives)], self.group)

    def wait(self) -> None:
        """Block until all messages are sent and received. Idempotent."""
        if not self.handles:
            return
        while self.handles:
            self.handles.pop().wait()
        group, sources = self.group, self.peers.receive
        if self.is_mean:
            sums, own = (*self.headers, *self.incoming[0]), (self.header, *self.outgoing[0])
            for into, out in zip(sums, own, strict=True):
                into.sub_(out)
            sources = sources[:1]
        for source, header in zip(sources, self.headers, strict=True):
            index = float(header[1]) / (group.size - 1 if self.is_mean else 1)
            if index != self.index:
                raise group.detector.report_error(
                    ValueError(
                        f"rank {group.ranks[source]} is at exchange {index:g} but rank "
                        f"{group.ranks[group.rank]} at {self.index}; call step() equally often "
                        "on all"
                    )
                )

    @property
    def weight_arrived(self) -> float:
        """The sum of the weights of all received messages."""
        return sum(float(header[0]) for header in self.headers)

    def arrived(self, section: int, part: slice = WHOLE) -> list[Tensor]:
        """Return a part of the body of every received message."""
        return [body[section][part] for body in self.incoming[: len(self.headers)]]

    def total(self, section: int) -> Tensor:
        """Return the sum of all received bodies, in the dtype in which it will be added."""
        if bodies := self.arrived(section):
            return sum_messages(bodies, accumulation_dtype(bodies[0].dtype))
        return torch.zeros((), device="cpu")

    def _header(self, weight: float) -> Tensor:
        body = (*self.outgoing[0], *self.incoming[0])[0]
        header = torch.tensor([weight, self.index], dtype=torch.float64, device="cpu")
        return header.to(body.device, non_blocking=True)


def gossip_round(
    topology: Topology, group: Group, parts: Sequence[Tensor], wire: str | None
) -> GossipRound:
    """Allocate buffers for the largest exchange of ``topology``; ``parts`` are like numerators."""
    exchanges = exchanges_of_periods(topology, group.size)
    rounds = [part.peers(group.rank, group.size, index) for part, index in exchanges]
    bodies = [
        part.to(torch.bfloat16) if wire == "bf16" and part.dtype.itemsize > 2 else part
        for part in parts
    ]

    def buffers(count: int) -> list[list[Tensor]]:
        return [[torch.zeros_like(body) for body in bodies] for _ in range(max(1, count))]

    shares = max(len({share for _, share in peers.send}) for peers in rounds)
    senders = max(len(peers.receive) for peers in rounds)
    return GossipRound(group, buffers(shares), buffers(senders))
