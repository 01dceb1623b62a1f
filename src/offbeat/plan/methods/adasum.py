"""``adasum``: shares by pairwise exchange, products of all pairs, and the way back."""

from typing import final

from offbeat.methods import AdasumUpdate
from offbeat.methods.adasum.gram import Gram
from offbeat.methods.adasum.participants import SMALL
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.halving import halving
from offbeat.plan.methods.slot import Section, StepTimes, gather_slices
from offbeat.plan.profile import Profile
from offbeat.plan.record import bound_in
from offbeat.topology.schedule import due
from offbeat.transport.world import Axis


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
        """Let the exchange choose its algorithm."""
        self.exchange, self.period, self.axis = exchange, exchange.every, exchange.over
        self.size, self.fabric = fabric.size(exchange.over), fabric
        self.layers = len(profile.tensors)
        bound = bound_in(exchange, profile, fabric)
        reduction, lengths = bound.reduction, bound.slice_layout.lengths
        self.held = [Section(n, f.itemsize) for n, f in zip(lengths, bound.flat, strict=True)]
        self.numel = sum(lengths)
        widest = 8 if exchange.wire is None else 2
        self.sent = sum(held.numel * min(held.itemsize, widest) for held in self.held)
        self.matrices = 8 * self.size**2 * self.layers  # bytes of the products of all pairs
        self.memory = float(bound.nbytes())
        self.combine = self._rvhdd
        if isinstance(reduction, Gram):
            self.memory += self.matrices
            self.combine = self._gram if reduction.split else self._gather

    def step(self, clocks: Clocks, step: int) -> None:
        """Combine the updates, if it is due."""
        speeds, numel, is_due = clocks.speeds, clocks.profile.numel, due(step, self.exchange.every)
        if not is_due or self.size == 1:
            self._broadcast_shares(clocks)
            return
        clocks.spend(numel * (speeds.copy + speeds.add))
        self.combine(clocks)
        if not self.exchange.partition:
            gather_slices(clocks, self.held, self.axis)
        clocks.spend(numel * (speeds.copy + speeds.add))
        self._broadcast_shares(clocks)

    def _broadcast_shares(self, clocks: Clocks) -> None:
        if self.exchange.partition and self.fabric.ranks_per_node > 1:
            clocks.wait(clocks.broadcast(clocks.now, clocks.profile.nbytes))

    def _gather(self, clocks: Clocks) -> None:
        self._cast(clocks)
        clocks.wait(clocks.at_once(clocks.now, self.sent, self.axis))
        clocks.spend(self.numel * self.size**2 * clocks.speeds.products / 2)
        self._total(clocks, over_group=False)
        clocks.spend(self.numel * self.size * clocks.speeds.combine)

    def _gram(self, clocks: Clocks) -> None:
        share, numel = self.sent // self.size, self.numel // self.size
        self._cast(clocks)
        clocks.wait(clocks.staged(clocks.now, share, self.axis))
        clocks.spend(numel * self.size**2 * clocks.speeds.products / 2)
        self._total(clocks, over_group=True)
        clocks.spend(numel * self.size * clocks.speeds.combine)
        clocks.wait(clocks.staged(clocks.now, share, self.axis))

    def _rvhdd(self, clocks: Clocks) -> None:
        speeds, products, axis = clocks.speeds, 32 * self.layers, self.axis
        levels = halving(self.size, tuple(self.held), products, clocks.fabric, axis)
        for level, (swap, sums, _) in enumerate(levels):
            swap.play(clocks, axis)
            clocks.spend(self.numel / 2 ** (level + 1) * (3 * speeds.products + 2 * speeds.combine))
            if axis == "node" and self.fabric.ranks_per_node > 1:
                clocks.wait(clocks.all_reduce(clocks.now, products, "local"))
            for trade in sums:
                trade.play(clocks, axis)
        for each in reversed(levels):
            each.back.play(clocks, axis)

    def _total(self, clocks: Clocks, over_group: bool) -> None:
        """Sum the products of all pairs over the ranks that hold other parts of the layers."""
        nbytes, fabric = self.matrices, self.fabric
        if self.exchange.wire == "fp16":  # the scale of every layer
            clocks.wait(clocks.all_gather(clocks.now, 8 * self.layers, self.axis))
        if self.axis == "node" and fabric.ranks_per_node > 1:
            self._add(clocks, nbytes, "local")
        if over_group:
            self._add(clocks, nbytes, self.axis)
        elif self.size < fabric.ranks:
            clocks.count(self.axis, nbytes)
            hops = (self.size - 1).bit_length()
            seconds = hops * fabric.path(self.axis, 1).seconds(nbytes)
            clocks.wait(clocks.collective(clocks.now, seconds, self.axis))

    def _add(self, clocks: Clocks, nbytes: int, axis: Axis) -> None:
        if (clocks.fabric.size(axis) - 1) * nbytes <= SMALL:
            clocks.wait(clocks.through_first(clocks.now, nbytes, axis))
        else:
            clocks.wait(clocks.all_reduce(clocks.now, nbytes, axis))

    def _cast(self, clocks: Clocks) -> None:
        if self.exchange.wire is not None:
            clocks.spend(self.numel * clocks.speeds.narrow)
