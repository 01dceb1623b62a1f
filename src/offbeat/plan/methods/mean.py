"""``ddp``, ``torch_ddp``, and the mean inside a node: buckets that overlap with backward."""

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from offbeat.exchange.engine.bucket import FIRST_BUCKET, capacity
from offbeat.functional import balance, runs_within
from offbeat.methods import Mean, TorchDDP
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import BackwardTimes, Section
from offbeat.plan.profile import Profile
from offbeat.transport.world import Axis

Members = Sequence[str]


@final
class MeanTimes(BackwardTimes):
    r"""Models :class:`offbeat.methods.Mean`: each bucket is one all-reduce.

    .. math::
        f_b = \max\Big(f_{b-1},\ \max_i s_{i,b}\Big) + 2 (n-1)
        \left(\alpha + \frac{m_b}{n B}\right)

    s is when rank i has filled bucket b, which needs its last gradient and two passes over all
    buckets so far, made by the thread that runs backward. With 16 bits a bucket is two staged
    pairwise exchanges; with a partition it is reduced to its owner.
    """

    def __init__(self, exchange: Mean | TorchDDP, profile: Profile, fabric: Fabric) -> None:
        """Fill the buckets as the exchange does."""
        self.axis: Axis = exchange.over
        self.is_ours = isinstance(exchange, Mean)
        narrow = isinstance(exchange, Mean) and exchange.wire == "bf16"
        limit = int(exchange.bucket_mb * 2**20)
        owners: Mapping[str, int | None] = dict.fromkeys(profile.order)
        if exchange.partition:
            sizes = [tensor.nbytes for tensor in profile.tensors.values()]
            homes = balance(sizes, fabric.ranks_per_node)
            owners = dict(zip(profile.tensors, homes, strict=True))
        self.buckets = [
            (members, self._section(members, profile, narrow), owners[members[0]])
            for members in _filled(profile, owners, limit, self.is_ours)
        ]
        self.memory = sum(section.nbytes for _, section, _ in self.buckets)
        self.memory += self.memory if narrow else 0

    def backward(self, clocks: Clocks) -> None:
        """Launch the buckets one after the other, and wait for the last one."""
        profile, begun, packed = clocks.profile, clocks.now, 0.0
        arrival, fabric = begun, clocks.fabric
        for members, section, owner in self.buckets:
            packed += section.numel * (clocks.speeds.copy + clocks.speeds.add)
            ready = begun + (max(profile.ready[name] for name in members) + packed) * clocks.pace
            if owner is not None:
                # Gloo's reduce: a ring that scatters sums, and gathers them on the owner.
                size = fabric.size(self.axis)
                others = np.arange(size) != owner
                clocks.count(self.axis, others * float(section.nbytes))
                arrival = clocks.ring(ready, section.nbytes / size, self.axis, 2)
            else:
                arrival = clocks.mean(ready, section.numel, section.itemsize, self.axis)
        clocks.now = begun + (profile.backward + packed) * clocks.pace
        clocks.wait(arrival)
        if any(owner is not None for _, _, owner in self.buckets):
            clocks.wait(clocks.all_reduce(clocks.now, 4, self.axis))  # of a non-finite gradient

    def _section(self, members: Members, profile: Profile, narrow: bool) -> Section:
        tensors = [profile.tensors[name] for name in members]
        numel = sum(tensor.numel() for tensor in tensors)
        itemsize = tensors[0].dtype.itemsize
        if narrow:
            itemsize = min(itemsize, 2)
        # Ours also hold one flag for each gradient, and the number of the call.
        return Section(numel + (len(members) + 1 if self.is_ours else 0), itemsize)


def _filled(
    profile: Profile, owners: Mapping[str, int | None], limit: int, is_ours: bool
) -> list[Members]:
    """Return the members of each bucket, in the order of launches."""
    kinds = {name: (profile.tensors[name].dtype, owners[name]) for name in profile.order}
    runs: list[Members] = []
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name in profile.order if kinds[name] == kind]
        sizes = [profile.tensors[name].nbytes for name in names]
        most = capacity(sum(sizes), limit) if is_ours else limit
        for run in runs_within(sizes, most, min(FIRST_BUCKET, most)):
            runs.append([names[index] for index in run])
    turn = {name: number for number, name in enumerate(profile.order)}
    return sorted(runs, key=lambda members: max(turn[name] for name in members))
