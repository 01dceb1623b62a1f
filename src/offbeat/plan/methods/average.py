"""``local_sgd``: the mean of all parameters every few steps."""

from typing import final

from offbeat.parameters import Average
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import StepTimes, gather_slices, sections, slices_on
from offbeat.plan.profile import Profile
from offbeat.schedule import due


@final
class AverageTimes(StepTimes):
    r"""Models :class:`offbeat.parameters.Average`: a blocking mean every ``every`` steps.

    .. math:: t_i \leftarrow \max_j t_j + 2 (n-1) \left(\alpha + \frac{m}{n B}\right)

    Three passes over memory: copy, divide, copy back.
    """

    def __init__(self, exchange: Average, profile: Profile, fabric: Fabric) -> None:
        """Divide the model into slices, if nodes are the participants."""
        self.exchange, self.period = exchange, exchange.every
        self.held = sections(profile.tensors, slices_on(fabric, exchange))
        rounded = sum(t.numel() for t in profile.tensors.values() if t.itemsize < 4)
        self.memory = profile.nbytes * (1 + (exchange.nonfinite == "skip"))
        self.memory += 4 * rounded / fabric.size(exchange.over)

    def step(self, clocks: Clocks, step: int) -> None:
        """Average, if it is due."""
        if not due(step, self.exchange.every):
            return
        speeds, numel = clocks.speeds, clocks.profile.numel
        clocks.spend(numel * speeds.copy)
        for section in self.held:
            axis = self.exchange.over
            clocks.wait(clocks.mean(clocks.now, section.numel, section.itemsize, axis))
        gather_slices(clocks, self.held, self.exchange.over)
        clocks.spend(numel * (speeds.add + speeds.copy))
