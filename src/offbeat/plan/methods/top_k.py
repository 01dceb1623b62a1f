"""``lags`` and ``slgs``: the largest entries of each layer, in messages that overlap backward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from offbeat.exchange.engine.bucket import BUCKET, FIRST_BUCKET, capacity
from offbeat.functional import LinkCost, count_kept, is_cheaper_dense, runs_within
from offbeat.functional.cost import INDEX
from offbeat.methods import TopK
from offbeat.methods.top_k.density import layer_densities
from offbeat.methods.top_k.payload import PayloadFormat, value_dtype
from offbeat.methods.top_k.timing import LayerTimes
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import BackwardTimes
from offbeat.plan.profile import Profile

Chosen = tuple[Sequence[str], int]  # parameters, and how many of their entries are sent; 0: all


@dataclass(frozen=True)
class _Message:
    """What is sent as one: the bytes of each rank, and the number of entries; 0 if dense."""

    names: Sequence[str]
    nbytes: int
    entries: int
    numel: int


@final
class TopKTimes(BackwardTimes):
    r"""Models :class:`offbeat.methods.TopK`: each message is one all-gather.

    .. math::
        f_b = \max\Big(f_{b-1},\ \max_i s_{i,b}\Big) + (n-1)
        \left(\alpha + \frac{8 k_b}{B}\right)

    with k entries in message b (of 8 bytes, or 6 with 16-bit values), which is ready when its last
    gradient is, all gradients so far were added to residuals, and entries were selected. Layers
    that cost no less sparse than dense go in buckets of the mean. After the last arrival the n k
    entries of all ranks are added up.
    Adaptive densities are those that the exchange would choose with the times of the profile.
    """

    def __init__(self, exchange: TopK, profile: Profile, fabric: Fabric) -> None:
        """Plan the messages as the exchange does."""
        self.exchange, self.axis = exchange, exchange.over
        self.size = fabric.size(exchange.over)
        self.densities = _densities(exchange, profile, fabric)
        self.messages = self._messages(profile)
        models = 3 + 2 * (exchange.momentum > 0)
        gathered = sum(message.nbytes for message in self.messages if message.entries)
        self.memory = models * 4 * profile.numel + self.size * gathered

    def backward(self, clocks: Clocks) -> None:
        """Launch the messages one after the other, wait for the last, and add them up."""
        profile, begun, spent = clocks.profile, clocks.now, 0.0
        speeds, arrival = clocks.speeds, clocks.now
        for message in self.messages:
            passes = speeds.add + (speeds.select if message.entries else speeds.copy)
            spent += message.numel * passes
            ready = begun + (max(profile.ready[name] for name in message.names) + spent) * (
                clocks.pace
            )
            if message.entries:
                arrival = clocks.all_gather(ready, message.nbytes, self.axis)
            else:
                arrival = clocks.all_reduce(ready, message.nbytes, self.axis)
        clocks.now = begun + (profile.backward + spent) * clocks.pace
        clocks.wait(arrival)
        entries = sum(message.entries for message in self.messages)
        clocks.spend(profile.numel * speeds.add / 3 + self.size * entries * speeds.scatter)

    def _messages(self, profile: Profile) -> list[_Message]:
        kinds: dict[tuple[torch.dtype, bool], list[Chosen]] = {}
        for names, k in self._blocks(profile):
            kind = profile.tensors[names[0]].dtype, k == 0
            kinds.setdefault(kind, []).append((names, k))
        found = []
        for (dtype, dense), blocks in kinds.items():
            value = value_dtype(dtype, self.exchange.wire).itemsize
            numels = [sum(profile.tensors[n].numel() for n in names) for names, _ in blocks]
            sizes = [
                numel * dtype.itemsize if dense else k * (value + INDEX)
                for numel, (_, k) in zip(numels, blocks, strict=True)
            ]
            limit = int(self.exchange.message_mb * 2**20)
            most = capacity(sum(sizes), BUCKET) if dense else limit
            first = min(FIRST_BUCKET, most) if dense else most
            for run in runs_within(sizes, most, first):
                names = [name for i in run for name in blocks[i][0]]
                numel, entries = sum(numels[i] for i in run), sum(blocks[i][1] for i in run)
                nbytes = (
                    (numel + len(names) + 1) * dtype.itemsize
                    if dense
                    else PayloadFormat(entries, len(names), dtype, self.exchange.wire).nbytes
                )
                found.append(_Message(names, nbytes, entries, numel))
        turn = {name: number for number, name in enumerate(profile.order)}
        return sorted(found, key=lambda message: max(turn[name] for name in message.names))

    def _blocks(self, profile: Profile) -> list[Chosen]:
        if self.exchange.scope == "layer":
            return [((name,), self._kept([name], profile)) for name in profile.order]
        dtypes = dict.fromkeys(profile.tensors[name].dtype for name in profile.order)
        blocks: list[Chosen] = []
        for dtype in dtypes:
            names = [name for name in profile.order if profile.tensors[name].dtype == dtype]
            k = self._kept(names, profile)
            blocks += [(names, k)] if k else [((name,), 0) for name in names]
        return blocks

    def _kept(self, names: Sequence[str], profile: Profile) -> int:
        numel = sum(profile.tensors[name].numel() for name in names)
        dtype = profile.tensors[names[0]].dtype
        k = count_kept(numel, self.densities[names[0]])
        value = value_dtype(dtype, self.exchange.wire).itemsize
        return 0 if is_cheaper_dense(numel, k, value, self.size, dtype.itemsize) else k


def _densities(exchange: TopK, profile: Profile, fabric: Fabric) -> Mapping[str, float]:
    sizes = {name: tensor.numel() for name, tensor in profile.tensors.items()}
    if not isinstance(exchange.density, str):
        return layer_densities(exchange.density, sizes)
    compute, before = {}, 0.0
    for name in profile.order:
        compute[name], before = profile.ready[name] - before, profile.ready[name]
    speeds = profile.speeds
    select = {n: t.numel() * (speeds.add + speeds.select) for n, t in profile.tensors.items()}
    size, hop = fabric.size(exchange.over), fabric.hop(exchange.over, 0.0, 1)
    per_byte = fabric.hop(exchange.over, 1.0, 1) - hop
    link = LinkCost(size, (size - 1) * hop, per_byte)
    times = LayerTimes(compute, select, profile.forward, link)
    message = exchange.message_mb * 2**20
    ratios = times.ratios(profile.tensors, exchange.max_ratio, message, exchange.wire)
    return {name: 1 / ratio for name, ratio in ratios.items()}
