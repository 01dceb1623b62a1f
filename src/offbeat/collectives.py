"""The only code that communicates: every function takes its group and returns a handle.

Measured on Gloo (torch 2.13, CPU), and the reason for the shapes below:

- The exchange of a pair is half-duplex for large messages (12.5 MB each way at 1 Gbit/s: 209 ms
  where 100 are ideal); cut into 1 MiB pieces with tags of their own it takes 110 ms.
- A send completes only when its receive is posted: all receives are posted first, and where it is
  known what comes before there is anything to send (:class:`Rounds`).
- Works and buffers must live until they were waited for: dropping the handle of a send whose
  receiver has long received made the group's next collectives time out.
- A 16-bit all-reduce errs by 2 to 3 units of 2^-8, because every hop rounds: we cast once, sum in
  float32 and round once. Staged pairwise exchange is also faster there than all_to_all_single
  (169 ms against 227 where 150 are ideal).
"""

import functools
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ParamSpec

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, ReduceOptions, Work

from offbeat.groups import Group

_Arguments = ParamSpec("_Arguments")
PIECE = 2**20  # bytes of one point-to-point message
Transfer = tuple[int, Tensor]  # (rank in the group, flat contiguous tensor)
Round = tuple[Sequence[Transfer], Sequence[Transfer]]  # what is sent, what is received


def _watched(launch: Callable[_Arguments, "Handle"]) -> Callable[_Arguments, "Handle"]:
    """Turn the error of a launch into the ranks' verdict: a lost peer may show here already."""

    @functools.wraps(launch)
    def launch_watched(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> "Handle":
        group = next(arg for arg in args if isinstance(arg, Group))
        with group.heartbeat.explaining():
            handle = launch(*args, **kwargs)
        if group.meter.spans is not None:
            handle.noted = handle.works[-1].get_future().then(handle.note_arrival)
        return handle

    return launch_watched


@dataclass(eq=False)
class Handle:
    """An exchange in flight, and the buffers it uses until it was waited for."""

    group: Group
    works: list[Work] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    after: Callable[[], object] | None = None
    future: "Future[None] | None" = None
    launched: float = field(default_factory=time.perf_counter)
    arrived: float | None = None
    noted: "torch.futures.Future[None] | None" = None

    def wait(self) -> None:
        """Block until the results are there; raise the ranks' verdict if a peer is lost.

        On CUDA with NCCL this orders the current stream after the exchange instead.
        """
        started, meter = time.perf_counter(), self.group.meter
        with self.group.heartbeat.watching():
            self.join()
        ended = time.perf_counter()
        meter.seconds_stalled += ended - started
        meter.span("stall", started, ended)

    def join(self) -> None:
        """Wait without watching: for the group's own lane, whose submitter watches."""
        for work in self.works:
            work.wait()
        if self.future is not None:
            self.future.result()
        if self.noted is not None:
            # A thread of Gloo's that is still in our callback when Python ends aborts the process.
            self.noted.wait()
        if self.after is not None:
            self.after()
        arrived = self.arrived or time.perf_counter()
        self.group.meter.span(f"wire:{self.group.axis}", self.launched, arrived)
        self.works, self.buffers = [], []
        self.after = self.future = self.noted = None

    def note_arrival(self, _: object) -> None:
        """The exchange is over, though nobody has waited for it yet."""
        self.arrived = time.perf_counter()


@_watched
def all_reduce(tensor: Tensor, group: Group) -> Handle:
    """Sum ``tensor`` over the group, in place. Sends 2 (n-1)/n of its bytes."""
    options = AllreduceOptions()
    options.reduceOp = ReduceOp(ReduceOp.SUM)
    work = group.process_group.allreduce([tensor], options)
    _count(group, 2 * (group.size - 1) * tensor.nbytes // group.size)
    return Handle(group, [work], [tensor])


@_watched
def reduce(tensor: Tensor, root: int, group: Group) -> Handle:
    """Sum ``tensor`` at the member ``root``, in place; the others' is scratch. Sends it once."""
    options = ReduceOptions()
    options.reduceOp, options.rootRank, options.rootTensor = ReduceOp(ReduceOp.SUM), root, 0
    work = group.process_group.reduce([tensor], options)
    _count(group, tensor.nbytes if group.rank != root else 0)
    return Handle(group, [work], [tensor])


@_watched
def all_gather(out: Tensor, tensor: Tensor, group: Group) -> Handle:
    """Fill ``out`` (n * numel) with every member's ``tensor``. Sends (n-1) times its bytes.

    ``tensor`` may be this rank's own chunk of ``out``.
    """
    # The tensor form of torch.distributed is deprecated in 2.13 and its successor is missing in
    # 2.11; the process group's own method is the same in both.
    work = group.process_group._allgather_base(out, tensor)
    _count(group, (group.size - 1) * tensor.nbytes)
    return Handle(group, [work], [out, tensor])


@_watched
def broadcast(tensor: Tensor, root: int, group: Group) -> Handle:
    """Copy ``tensor`` from the member ``root``, in place. Each byte arrives once per member.

    Any dtype, contiguous: it travels as bytes.
    """
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    work = group.process_group.broadcast([tensor.view(-1).view(torch.uint8)], options)
    _count(group, tensor.nbytes)
    return Handle(group, [work], [tensor])


def exchange(sends: Sequence[Transfer], receives: Sequence[Transfer], group: Group) -> Handle:
    """Point-to-point messages in both directions at once, in pieces of 1 MiB.

    At most 1,000 pieces a message keep their own tag; later ones share tags in order. On both
    sides the messages of one pair are matched in the order listed.
    """
    return Rounds([(sends, receives)], group).start()


class Rounds:
    """Several exchanges, one after the other, made again and again between the same tensors.

    What :func:`exchange` does with each, but for what can be prepared once: pieces and tags.
    """

    def __init__(self, rounds: Sequence[Round], group: Group) -> None:
        """Prepare ``rounds``: what is sent in each, and what is received."""
        self._group, self._next = group, 0
        self._sends = [_pieces(sends) for sends, _ in rounds]
        self._receives = [_pieces(receives) for _, receives in rounds]
        self._buffers = [[t for _, t in (*sends, *receives)] for sends, receives in rounds]
        self._counts = [(sum(t.nbytes for _, t in sends), len(sends)) for sends, _ in rounds]
        devices = [tensor.device for tensors in self._buffers for tensor in tensors]
        # NCCL matches point-to-point calls within one group call only.
        self._nccl = devices[0] if devices and group.backend(devices[0]) == "nccl" else None
        self._expected: list[list[Work]] = []

    def expect(self) -> None:
        """Post the receives of all rounds already; :meth:`start` does so at the latest.

        A message whose receive waits for it leaves at once. Else both sides tell each other
        first, which wakes a thread on each: three hops of 64 KiB between 4 ranks take 1.7 ms
        instead of 4.1.
        """
        if self._nccl is None and not self._expected:
            receive = self._group.process_group.recv
            with self._group.heartbeat.explaining():
                self._expected = [
                    [receive(*piece) for piece in round_] for round_ in self._receives
                ]

    def start(self) -> Handle:
        """Launch the next round; after the last comes the first again."""
        self.expect()
        index = self._next
        with self._group.heartbeat.explaining():
            works = self._launch(index)
        if works:
            _count(self._group, *self._counts[index])
        self._next = (index + 1) % len(self._sends)
        if self._next == 0:
            self._expected = []
        return Handle(self._group, works, self._buffers[index])

    def _launch(self, index: int) -> list[Work]:
        process_group = self._group.process_group
        if self._nccl is None:
            return [*self._expected[index], *(process_group.send(*p) for p in self._sends[index])]
        process_group._start_coalescing(self._nccl)
        for piece in self._receives[index]:
            process_group.recv(*piece)
        for piece in self._sends[index]:
            process_group.send(*piece)
        return [process_group._end_coalescing(self._nccl)]


class DirectSum:
    """Sums a small tensor over the group, in place and again and again; equal bit for bit.

    Sends n-1 times its bytes, in one hop instead of the 2 (n-1) of a ring: 2 KiB between 4 nodes
    at 250 Mbit/s take 4 ms instead of 10.
    """

    def __init__(self, tensor: Tensor, group: Group) -> None:
        """Prepare to sum ``tensor``, contiguous."""
        self._flat = tensor.view(-1)
        self._everyone = tensor.new_empty(group.size, tensor.numel())
        self._mine = self._everyone[group.rank]
        others = [rank for rank in range(group.size) if rank != group.rank]
        sends = [(rank, self._mine) for rank in others]
        receives = [(rank, self._everyone[rank]) for rank in others]
        self._rounds = Rounds([(sends, receives)], group)

    def expect(self) -> None:
        """Post the receives already."""
        self._rounds.expect()

    def start(self) -> Handle:
        """Sum what the tensor holds now."""
        self._mine.copy_(self._flat)
        handle = self._rounds.start()
        # In the order of ranks, the same everywhere: sums of floats depend on it.
        handle.after = lambda: torch.sum(self._everyone, 0, out=self._flat)
        return handle


def mean(tensor: Tensor, group: Group) -> Handle:
    """Average ``tensor`` over the group, in place, equal on all members bit for bit.

    16-bit tensors are summed in float32 and rounded once, at the same 2 (n-1)/n of their bytes
    and n/(n-1) of their memory; wider ones go through one all-reduce.
    """
    if tensor.dtype.itemsize > 2:
        handle = all_reduce(tensor, group)
        handle.after = lambda: tensor.div_(group.size)
        return handle
    if tensor.is_cuda:  # streams keep the order: nothing here blocks the host
        _mean_16bit(tensor, group)
        return Handle(group, [], [tensor])
    return Handle(group, buffers=[tensor], future=group.lane.submit(_mean_16bit, tensor, group))


def _mean_16bit(tensor: Tensor, group: Group) -> None:
    rank, size = group.rank, group.size
    chunk = -(-tensor.numel() // size)
    padded = tensor.new_zeros(size * chunk)
    padded[: tensor.numel()] = tensor
    parts = padded.view(size, chunk)
    arrived = torch.empty_like(parts)
    arrived[rank] = parts[rank]
    # Point-to-point messages alone, no collective: these run on the group's lane while the main
    # thread launches collectives on the same group, and where ours fell among them would depend
    # on the clock. A rank that launched ours first would pair it with another's all-reduce.
    hops = [((rank + hop) % size, (rank - hop) % size) for hop in range(1, size)]
    for to, source in hops:
        exchange([(to, parts[to])], [(source, arrived[source])], group).join()
    parts[rank] = arrived.float().mean(0)
    for to, source in hops:
        exchange([(to, parts[rank])], [(source, parts[source])], group).join()
    tensor.copy_(padded[: tensor.numel()])


def gather_bytes(payload: bytes, group: Group) -> list[bytes]:
    """Every member's ``payload``, whatever the lengths; two small all-gathers."""
    device = wire_device(group)
    sizes = torch.zeros(group.size, dtype=torch.int64, device=device)
    all_gather(sizes, torch.tensor([len(payload)], device=device), group).wait()
    longest = max(1, int(sizes.max()))
    padded = bytearray(payload.ljust(longest, b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    everyone = torch.zeros(group.size * longest, dtype=torch.uint8, device=device)
    all_gather(everyone, mine, group).wait()
    rows = everyone.view(group.size, longest).cpu()
    return [bytes(row[:n].tolist()) for row, n in zip(rows, sizes.tolist(), strict=True)]


def raise_alike(fault: str | None, group: Group | None) -> None:
    """Raise a ValueError on all ranks if any has a ``fault``, naming the first that has."""
    faults = (
        [(fault or "").encode()] if group is None else gather_bytes((fault or "").encode(), group)
    )
    ranks = (None,) if group is None else group.ranks
    for rank, text in zip(ranks, faults, strict=True):
        if text:
            where = "" if rank is None else f"rank {rank}: "
            raise ValueError(where + text.decode())


def gather_numbers(numbers: Sequence[float], group: Group) -> list[tuple[float, ...]]:
    """Every member's few float64 ``numbers``; one small all-gather."""
    packed = struct.pack(f"{len(numbers)}d", *numbers)
    device = wire_device(group)
    mine = torch.frombuffer(bytearray(packed), dtype=torch.float64).to(device)
    out = torch.empty(group.size * len(numbers), dtype=torch.float64, device=device)
    all_gather(out, mine, group).wait()
    return [tuple(row) for row in out.view(group.size, -1).tolist()]


def wire_device(group: Group, device: torch.device | str = "cpu") -> torch.device:
    """Where messages about tensors on ``device`` must live.

    Gloo sends no point-to-point messages from a GPU: they go through the host.
    """
    device = torch.device(device)
    if "nccl" not in (group.backend(device), group.backend("cuda")):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cpu" else device


def _pieces(transfers: Sequence[Transfer]) -> list[tuple[list[Tensor], int, int]]:
    """What a process group's ``send`` and ``recv`` take: tensors, peer, tag."""
    # Tags need only differ within a pair: the n-th message of a pair takes n * 1000 and up.
    seen: dict[int, int] = {}
    pieces = []
    for peer, tensor in transfers:
        first = 1000 * seen.setdefault(peer, 0)
        seen[peer] += 1
        cut = (tensor,) if tensor.nbytes <= PIECE else tensor.split(PIECE // tensor.dtype.itemsize)
        pieces += [([piece], peer, first + i % 1000) for i, piece in enumerate(cut)]
    return pieces


def _count(group: Group, sent: int, messages: int = 1) -> None:
    group.meter.sent(group.axis, sent, messages)
