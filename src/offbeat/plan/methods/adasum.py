"""``adasum``: shares by pairwise exchange, products of all pairs, and the way back."""

from typing import Literal, final

from offbeat.functional import Layout, balance
from offbeat.methods import AdasumUpdate
from offbeat.methods.adasum.method import choose
from offbeat.methods.adasum.participants import SMALL
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.halving import halving
from offbeat.plan.methods.slot import Section, StepTimes, gather_slices, sections, slices_on
from offbeat.plan.profile import Profile
from offbeat.plan.record import bound_in
from offbeat.topology.schedule import due


@final
class AdasumTimes(StepTimes):
    r"""Models :class:`offbeat.methods.AdasumUpdate`: blocking, by one of three algorithms.

    .. math::
        gather&: (n-1) \frac{m}{B} + 2 \alpha \\
        gram&: 2 (n-1) \left(2 \alpha + \frac{m}{n B}\right) + t(8 n^2 L) \\
        rvhdd&: \sum_{l=1}^{\log_2 n} 2 \left(2 \alpha + \frac{m}{2^l B}\right)
        + (2 \alpha + t(32 L)) \, l

    from when the last participant has come. With rvhdd m is the model in full precision, and where
    n is no power of two some send more than half. The inner products of all pairs of n
    participants, 8 bytes for each of L layers, are added by the first one while they are small,
    else by an all-reduce. ``within="local"`` first adds them up inside each node.
    """

    def __init__(self, exchange: AdasumUpdate, profile: Profile, fabric: Fabric) -> None:
        """Choose the algorithm as the exchange does."""
        self.exchange, self.period, self.axis = exchange, exchange.every, exchange.over
        self.size, self.fabric = fabric.size(exchange.over), fabric
        self.layers, slices = len(profile.tensors), slices_on(fabric, exchange)
        self.held = self._sections(profile, slices)
        narrow = 2 if exchange.wire is not None else 8
        self.body = [Section(h.numel, min(h.itemsize, narrow)) for h in self.held]
        self.sent = sum(section.nbytes for section in self.body)
        full = sum(section.nbytes for section in self.held)
        is_wide = exchange.wire is None and all(section.itemsize >= 4 for section in self.held)
        self.kind = choose(exchange.method, self.size, self.layers, self.sent, full, is_wide)
        self.memory = float(bound_in(exchange, profile, fabric).nbytes())
        self.memory += 8 * self.size**2 * self.layers if self.kind != "rvhdd" else 0

    def step(self, clocks: Clocks, step: int) -> None:
        """Combine the updates, if it is due."""
        speeds, numel, is_due = clocks.speeds, clocks.profile.numel, due(step, self.exchange.every)
        if not is_due or self.size == 1:
            self._broadcast_shares(clocks)
            return
        clocks.spend(numel * (speeds.copy + speeds.add))
        exchanges = {"gather": self._gather, "gram": self._gram, "rvhdd": self._rvhdd}
        exchanges[self.kind](clocks)
        if not self.exchange.partition:
            gather_slices(clocks, self.held, self.axis)
        clocks.spend(numel * (speeds.copy + speeds.add))
        self._broadcast_shares(clocks)

    def _broadcast_shares(self, clocks: Clocks) -> None:
        if self.exchange.partition and self.fabric.ranks_per_node > 1:
            clocks.wait(clocks.broadcast(clocks.now, clocks.profile.nbytes))

    def _gather(self, clocks: Clocks) -> None:
        numel = sum(section.numel for section in self.body)
        self._cast(clocks)
        clocks.wait(clocks.at_once(clocks.now, self.sent, self.axis))
        clocks.spend(numel * self.size**2 * clocks.speeds.products / 2)
        self._total(clocks, 8 * self.size**2 * self.layers, over_group=False)
        clocks.spend(numel * self.size * clocks.speeds.combine)

    def _gram(self, clocks: Clocks) -> None:
        share = self.sent // self.size
        numel = sum(section.numel for section in self.body) // self.size
        self._cast(clocks)
        clocks.wait(clocks.staged(clocks.now, share, self.axis))
        clocks.spend(numel * self.size**2 * clocks.speeds.products / 2)
        self._total(clocks, 8 * self.size**2 * self.layers)
        clocks.spend(numel * self.size * clocks.speeds.combine)
        clocks.wait(clocks.staged(clocks.now, share, self.axis))

    def _rvhdd(self, clocks: Clocks) -> None:
        speeds, numel = clocks.speeds, sum(section.numel for section in self.held)
        products, axis = 32 * self.layers, self.axis
        levels = halving(self.size, tuple(self.held), products, clocks.fabric, axis)
        for level, (swap, sums, _) in enumerate(levels):
            swap.play(clocks, axis)
            clocks.spend(numel / 2 ** (level + 1) * (3 * speeds.products + 2 * speeds.combine))
            if axis == "node" and self.fabric.ranks_per_node > 1:
                clocks.wait(clocks.all_reduce(clocks.now, products, "local"))
            for trade in sums:
                trade.play(clocks, axis)
        for each in reversed(levels):
            each.back.play(clocks, axis)

    def _total(self, clocks: Clocks, nbytes: int, over_group: bool = True) -> None:
        """Sum the products over the ranks that hold other parts of the layers."""
        local = self.fabric.ranks_per_node
        if self.exchange.wire == "fp16":  # the scale of every layer
            clocks.wait(clocks.all_gather(clocks.now, 8 * self.layers, self.axis))
        inside = self.axis == "node" and local > 1
        if inside:
            self._add(clocks, nbytes, "local")
        if over_group:
            self._add(clocks, nbytes, self.axis)
        elif self.size < self.fabric.ranks:
            clocks.count(self.axis, nbytes)
            hops = (self.size - 1).bit_length()
            path = self.fabric.path(self.axis, 1, local)
            seconds = hops * path.seconds(nbytes)
            clocks.wait(clocks.collective(clocks.now, seconds, self.axis))

    def _add(self, clocks: Clocks, nbytes: int, axis: Literal["world", "node", "local"]) -> None:
        if (clocks.fabric.size(axis) - 1) * nbytes <= SMALL:
            clocks.wait(clocks.through_first(clocks.now, nbytes, axis))
        else:
            clocks.wait(clocks.all_reduce(clocks.now, nbytes, axis))

    def _cast(self, clocks: Clocks) -> None:
        if self.exchange.wire is not None:
            clocks.spend(sum(section.numel for section in self.body) * clocks.speeds.narrow)

    def _sections(self, profile: Profile, slices: int) -> list[Section]:
        if not self.exchange.partition:
            padded = sections(profile.tensors, slices * self.size)
            return [Section(held.numel * self.size, held.itemsize) for held in padded]
        sizes = [tensor.nbytes for tensor in profile.tensors.values()]
        owners = dict(zip(profile.tensors, balance(sizes, slices), strict=True))
        layout = Layout.whole(profile.tensors, owners, slices, self.size)
        found = zip(layout.numels, layout.dtypes, strict=True)
        return [Section(numel // slices, dtype.itemsize) for numel, dtype in found]
