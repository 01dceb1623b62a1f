"""Exchanges of gradients: messages that overlap with backward."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from offbeat.exchange import Site
from offbeat.exchange.engine.bucket import FIRST_BUCKET, in_buckets
from offbeat.functional import LinkCost, runs_within
from offbeat.methods import Mean, TopK, TorchDDP
from offbeat.methods.top_k.payload import PayloadFormat
from offbeat.methods.top_k.timing import LayerTimes
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import sections
from offbeat.plan.profile import Profile
from offbeat.plan.record import site_in


@dataclass(frozen=True)
class Message:
    """What is sent as one: the bytes of each rank, and the number of entries; 0 if dense.

    The sum of a dense one is sent to the rank ``owner``, if there is one, else to all.
    """

    names: Sequence[str]
    numel: int
    itemsize: int
    nbytes: int
    entries: int = 0
    owner: int | None = None


@final
class GradientTimes:
    r"""Models :class:`offbeat.methods.Mean` and :class:`offbeat.methods.TopK`.

    .. math::
        f_b &= \max_i s_{i,b} + A(m_b) \\
        f_b &= \max_i s_{i,b} + G(8 k_b)

    for a bucket of m bytes, which is one all-reduce, and for k entries (of 8 bytes, or 6 with
    16-bit values), which are one all-gather; two are on their way at a time. s is when rank i has
    filled message b: that needs its last gradient, two passes over all buckets so far, made by the
    thread that runs backward, and of entries their selection. With 16 bits a bucket is two staged
    pairwise exchanges; with a partition it is reduced to its owner. After the last arrival the n k
    entries of all ranks are added up. Adaptive densities are those that the exchange would choose
    with the times of the profile.
    """

    def __init__(self, exchange: Mean | TorchDDP | TopK, profile: Profile, fabric: Fabric) -> None:
        """Fill the messages as the exchange does."""
        self.exchange, self.axis, self.size = exchange, exchange.over, fabric.size(exchange.over)
        site = site_in(profile.tensors, fabric, exchange.over)
        if isinstance(exchange, TopK):
            found = _sparse(exchange, site, profile, fabric)
            models = 3 + 2 * (exchange.momentum > 0)
            gathered = sum(message.nbytes for message in found if message.entries)
            wide = sum(section.nbytes for section in sections(profile.tensors, wide=True))
            self.memory = models * wide + self.size * gathered
        else:
            found = _buckets(exchange, site, profile)
            copies = 1 + (isinstance(exchange, Mean) and exchange.wire is not None)
            self.memory = copies * sum(message.nbytes for message in found)
        turn = {name: number for number, name in enumerate(profile.order)}
        self.messages = sorted(found, key=lambda message: max(turn[n] for n in message.names))

    def backward(self, clocks: Clocks) -> None:
        """Move the clocks from the end of forward to the moment when ``.grad`` is complete."""
        profile, speeds, begun, spent = clocks.profile, clocks.speeds, clocks.now, 0.0
        arrival = begun
        for message in self.messages:
            last = speeds.select if message.entries else speeds.copy
            spent += message.numel * (speeds.add + last)
            filled = max(profile.ready[name] for name in message.names) + spent
            ended = self._launch(message, begun + filled * clocks.pace, clocks)
            arrival = np.maximum(arrival, ended)  # two pass at a time
        clocks.now = begun + (profile.backward + spent) * clocks.pace
        clocks.wait(arrival)
        if isinstance(self.exchange, TopK):
            entries = sum(message.entries for message in self.messages)
            clocks.spend(profile.numel * speeds.add / 3 + self.size * entries * speeds.scatter)
        elif self.exchange.partition:
            clocks.wait(clocks.all_reduce(clocks.now, 4, self.axis))  # of a non-finite gradient

    def _launch(self, message: Message, ready: Array, clocks: Clocks) -> Array:
        """Return when a message that is filled at ``ready`` has arrived."""
        if message.entries:
            return clocks.all_gather(ready, message.nbytes, self.axis)
        if message.owner is None:
            numel = message.nbytes // message.itemsize
            return clocks.mean(ready, numel, message.itemsize, self.axis)
        # Gloo's reduce: a ring that scatters sums, and gathers them on the owner.
        others = np.arange(self.size) != message.owner
        clocks.count(self.axis, others * float(message.nbytes))
        return clocks.ring(ready, message.nbytes / self.size, self.axis, 2)


def _dense(
    site: Site, members: Iterable[Sequence[str]], itemsize: int = 8, flags: bool = True
) -> list[Message]:
    """Return a message for each bucket, in at most ``itemsize`` bytes for one value.

    With ``flags`` there is one for each gradient, and the number of the call.
    """
    found = []
    for names in members:
        tensors = [site.parameters[name] for name in names]
        numel, size = sum(t.numel() for t in tensors), min(itemsize, tensors[0].itemsize)
        nbytes = (numel + flags * (len(names) + 1)) * size
        found.append(Message(names, numel, size, nbytes))
    return found


def _buckets(exchange: Mean | TorchDDP, site: Site, profile: Profile) -> list[Message]:
    sizes = {name: site.parameters[name].nbytes for name in profile.order}
    limit = int(exchange.bucket_mb * 2**20)
    if isinstance(exchange, TorchDDP):  # whose buckets are not smaller where there are few
        members = []
        for dtype in dict.fromkeys(site.parameters[name].dtype for name in sizes):
            names = [name for name in sizes if site.parameters[name].dtype == dtype]
            runs = runs_within([sizes[n] for n in names], limit, min(FIRST_BUCKET, limit))
            members += [[names[index] for index in run] for run in runs]
        return _dense(site, members, flags=False)
    owners: Mapping[str, int | None] = site.owners() if exchange.partition else dict.fromkeys(sizes)
    kinds = {name: (site.parameters[name].dtype, owners[name]) for name in sizes}
    members = in_buckets(sizes, kinds, limit)
    found = _dense(site, members, 8 if exchange.wire is None else 2)
    return [replace(message, owner=owners[message.names[0]]) for message in found]


def _sparse(exchange: TopK, site: Site, profile: Profile, fabric: Fabric) -> list[Message]:
    plan = exchange.plan_of(site, exchange.warmup or 0, _densities(exchange, profile, fabric))
    found = _dense(site, plan.dense(profile.order))
    for blocks in plan.sparse(profile.order):
        names = [name for members, _ in blocks for name in members]
        numel = sum(site.parameters[name].numel() for name in names)
        dtype, entries = site.parameters[names[0]].dtype, sum(k for _, k in blocks)
        nbytes = PayloadFormat(entries, len(names), dtype, exchange.wire).nbytes
        found.append(Message(names, numel, dtype.itemsize, nbytes, entries))
    return found


def _densities(exchange: TopK, profile: Profile, fabric: Fabric) -> Mapping[str, float]:
    if exchange.density != "adaptive":
        return exchange.densities_of(profile.tensors)
    compute, before = {}, 0.0
    for name in profile.order:
        compute[name], before = profile.ready[name] - before, profile.ready[name]
    speeds = profile.speeds
    select = {n: t.numel() * (speeds.add + speeds.select) for n, t in profile.tensors.items()}
    size, hop = fabric.size(exchange.over), fabric.hop(exchange.over, 0.0)
    per_byte = fabric.hop(exchange.over, 1.0) - hop
    times = LayerTimes(compute, select, profile.forward, LinkCost(size, (size - 1) * hop, per_byte))
    message = exchange.message_mb * 2**20
    ratios = times.ratios(profile.tensors, exchange.max_ratio, message, exchange.wire)
    return {name: 1 / ratio for name, ratio in ratios.items()}
