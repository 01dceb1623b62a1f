"""``sgp(outer=...)``: gossip, and a blocking exact average every few steps."""

from typing import final

from offbeat.methods import SlowMomentum
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.outer_step import models_of, outer_step
from offbeat.plan.methods.push_sum import PushSumTimes
from offbeat.plan.methods.slot import CALL, StepTimes, gather_slices, sections, slices_on
from offbeat.plan.profile import Profile
from offbeat.topology.schedule import due


@final
class SlowMomentumTimes(StepTimes):
    r"""Models :class:`offbeat.methods.SlowMomentum`.

    .. math::
        t_i \leftarrow \max_j \max(t_j, f_j) + G(0) + A(m)

    with the end f of the gossip that is in flight; first the weights are gathered, then the
    numerators are added up.
    """

    def __init__(self, exchange: SlowMomentum, profile: Profile, fabric: Fabric) -> None:
        """Model the gossip, and divide the average into slices."""
        self.exchange, self.gossip = exchange, PushSumTimes(exchange.gossip, profile, fabric)
        self.period, self.lead = exchange.every, self.gossip.lead
        slices = slices_on(fabric, exchange)
        self.held = sections(profile.tensors, slices, wide=True)
        own = sum(section.nbytes for section in self.held)
        # Of parameters of 16 bits what rounding takes is kept, too.
        lost = sum(4 * t.numel() for t in profile.tensors.values() if t.itemsize == 2) / slices
        anchors = (1 + models_of(exchange.outer)) * own + lost
        self.memory = self.gossip.memory + slices * own + anchors

    def restart(self) -> None:
        """Begin with no gossip in flight."""
        self.gossip.restart()

    def step(self, clocks: Clocks, step: int) -> None:
        """Gossip, and average if it is due."""
        self.gossip.step(clocks, step)
        if not due(step, self.exchange.every):
            return
        axis, speeds = self.exchange.over, clocks.speeds
        if self.gossip.pending is not None:
            clocks.wait(self.gossip.pending)
        clocks.spend(clocks.profile.numel * (2 * speeds.copy + 2 * speeds.add))
        gather_slices(clocks, self.gossip.sums, axis)
        clocks.wait(clocks.all_gather(clocks.now, CALL, axis))
        for section in self.held:
            clocks.wait(clocks.all_reduce(clocks.now, section.nbytes, axis))
        outer_step(clocks, sum(section.numel for section in self.held), axis)
        gather_slices(clocks, self.held, axis)
        clocks.spend(clocks.profile.numel * speeds.copy)
        self.gossip.restart()
