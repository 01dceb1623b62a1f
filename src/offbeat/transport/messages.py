"""Point-to-point messages, sent once or repeatedly.

Measured on Gloo (torch 2.13, CPU), and the reason for the shapes below:

- A send completes only when its receive is posted: receives are posted first, and small ones, if
  their shapes are known, before there is anything to send (:class:`MessageRounds`).
- Word of a receive waits for what is being sent on the same connection. A pair that posts its
  sends first exchanges large messages one way at a time (12.5 MB each way at 1 Gbit/s: 208 ms, and
  104 if the receives are first, where 100 are ideal). Pieces of 8 MiB with their own tags bound
  that wait. Smaller ones cost time: 51 MB from each of 4 nodes to the next take 463 ms in pieces
  of 1 MiB, 430 in pieces of 8 MiB, and 429 as a whole.
- Pieces with different tags use the connections of a pair in turn, where it has several.
"""

from collections.abc import Collection, Sequence
from itertools import starmap

import torch
from torch import Tensor
from torch.distributed import Work

from offbeat.platform.process_group import coalesced
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle

PIECE = 2**23  # bytes of one point-to-point message
SHARE = 2**16  # bytes of a piece, at least, where a message is divided among connections
WIDE = 2**17  # bytes by which the windows of TCP grow, as much as four round trips allow
EARLY = 2**16  # bytes: receives of smaller rounds may be posted before the messages are sent
Transfer = tuple[int, Tensor]  # (rank in the group, flat contiguous tensor)
Round = tuple[Sequence[Transfer], Sequence[Transfer]]  # sends, receives


def exchange(sends: Sequence[Transfer], receives: Sequence[Transfer], group: Group) -> Handle:
    """Launch point-to-point messages in both directions at once, in pieces of at most 8 MiB.

    At most 1,000 pieces of a message have their own tag; later ones share tags in order. On both
    sides the messages of one pair are matched in the order listed.
    """
    return MessageRounds([(sends, receives)], group).start()


def exchange_with_all(sent: Sequence[Tensor] | Tensor, arrives: Tensor, group: Group) -> None:
    """Send ``sent[i]`` to each other member i, receive ``arrives[i]`` from it, and wait.

    Without the failure detector. One member after the other: on near links no two senders share one
    then. On far ones all leave at once, since each hop would wait for a round trip: two rounds of 3
    hops of 0.2 MB between 4 nodes take 0.4 s instead of 1.2 at 100 ms and 100 Mbit/s. Members need
    not agree on which it is.
    """
    rank, size, flying = group.rank, group.size, list[Handle]()
    for hop in range(1, size):
        to, source = (rank + hop) % size, (rank - hop) % size
        flying.append(exchange([(to, sent[to])], [(source, arrives[source])], group))
        if not group.is_far:
            flying.pop().join()
    for handle in flying:
        handle.join()


def widen(peers: Collection[int], group: Group) -> None:
    """Start to send 128 KiB to each of ``peers`` and to receive as much, so that windows grow.

    Before the first messages to members far away: over a connection that is new or has rested, TCP
    sends 14 kB in the first round trip, and in each later one twice as much. The members must name
    each other. Over more than two connections 64 KiB each. Nobody waits: another call for the group
    would, when all has long arrived.
    """
    if group.backend("cpu") != "gloo" or not peers:
        return
    group.settle()
    out = torch.zeros(max(WIDE, SHARE * group.connections), dtype=torch.uint8, device="cpu")
    receives = [(peer, torch.empty_like(out)) for peer in peers]
    group.owed = exchange([(peer, out) for peer in peers], receives, group).wait


class MessageRounds:
    """Repeats several exchanges, launched one after the other, between the same tensors.

    The same as :func:`exchange` for each, with pieces and tags prepared once.
    """

    def __init__(self, rounds: Sequence[Round], group: Group, early: int = EARLY) -> None:
        """Cut the messages into pieces; ``early``: see :meth:`expect`, bytes of a round."""
        self._group, self._next = group, 0
        self._sends = [_pieces(sends, group) for sends, _ in rounds]
        self._receives = [_pieces(receives, group) for _, receives in rounds]
        self._buffers = [[t for _, t in (*sends, *receives)] for sends, receives in rounds]
        self._counts = [(sum(t.nbytes for _, t in sends), len(sends)) for sends, _ in rounds]
        devices = [tensor.device for tensors in self._buffers for tensor in tensors]
        # NCCL matches point-to-point calls within one group call only.
        self._joint = devices[0] if devices and group.backend(devices[0]) != "gloo" else None
        received = max((sum(t.nbytes for _, t in receives) for _, receives in rounds), default=0)
        self._early = self._joint is None and received <= early
        self._expected: list[list[Work]] = []
        group.in_flight.add(self)

    def expect(self) -> bool:
        """Post the receives of all rounds, if those are small; return whether they are posted.

        Messages of one pair are matched with receives in the order of their posting: receives of
        later messages must not be posted before these.

        A message whose receive is posted is sent at once. Otherwise both sides exchange requests
        first, which wakes a thread on each: three hops of 64 KiB between 4 ranks take 1.7 ms
        instead of 4.1. Large messages that are sent at once arrive together with another rank's,
        and two senders share the link of one receiver: seven hops of 128 KiB between 8 nodes take
        11.5 ms instead of 10.7 at 1 Gbit/s, and 32.0 instead of 29.7 at 250 Mbit/s.
        """
        if self._early and not self._expected:
            with self._group.detector.explaining():
                self._expected = [self._post(index) for index in range(len(self._receives))]
        return bool(self._expected)

    def start(self) -> Handle:
        """Launch the next round; the first follows the last."""
        self.expect()
        index = self._next
        # Counted before they are launched: who has received them may read the counters.
        if self._sends[index] or self._receives[index]:
            self._group.meter.sent(self._group.axis, *self._counts[index])
        with self._group.detector.explaining():
            works = self._launch(index)
        self._next = (index + 1) % len(self._sends)
        if self._next == 0:
            self.drop()
        return Handle(self._group, works, self._buffers[index], is_paired=self._joint is None)

    def drop(self) -> None:
        """Drop the receives that are posted."""
        self._expected = []

    def _launch(self, index: int) -> list[Work]:
        process_group = self._group.process_group
        if self._joint is None:
            receives = self._expected[index] if self._expected else self._post(index)
            # No closure over the process group: an error would keep it, and its sockets, alive.
            return [*receives, *starmap(process_group.send, self._sends[index])]

        def launch() -> None:
            for piece in self._receives[index]:
                process_group.recv(*piece)
            for piece in self._sends[index]:
                process_group.send(*piece)

        return [coalesced(process_group, self._joint, launch)]

    def _post(self, index: int) -> list[Work]:
        return [self._group.process_group.recv(*piece) for piece in self._receives[index]]


def _pieces(transfers: Sequence[Transfer], group: Group) -> list[tuple[list[Tensor], int, int]]:
    """Return the arguments of a process group's ``send`` and ``recv``: tensors, peer, tag."""
    # Tags need only differ within a pair: the n-th message of a pair takes n * 1000 and up.
    seen: dict[int, int] = {}
    pieces = []
    for peer, tensor in transfers:
        first = 1000 * seen.setdefault(peer, 0)
        seen[peer] += 1
        most = min(PIECE, max(SHARE, -(-tensor.nbytes // group.connections)))
        # Rounded up: one connection would have the rest beside its piece.
        cut = (tensor,) if tensor.nbytes <= most else tensor.split(-(-most // tensor.itemsize))
        pieces += [([piece], peer, first + i % 1000) for i, piece in enumerate(cut)]
    return pieces
