"""``ad_psgd``: pairs of participants average in a thread, and nobody waits."""

from typing import final

import numpy as np

from offbeat.methods import PairAverage
from offbeat.plan.clocks import Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import StepTimes, gather_slices, sections, slices_on
from offbeat.plan.profile import Profile

WORD = 8  # bytes of the request of an exchange


@final
class PairAverageTimes(StepTimes):
    r"""Models :class:`offbeat.methods.PairAverage`: exchanges between steps that do not wait.

    .. math:: f = \max(t_i, f_i, f_j) + 3 \alpha + \frac{m}{B}

    for participant i, which has an even number and no exchange in flight at the end of its step,
    with j, which has an odd one, is drawn at random, and serves one after the other. The step
    itself takes its own passes over memory only: one, and two more after an exchange.
    """

    def __init__(self, exchange: PairAverage, profile: Profile, fabric: Fabric) -> None:
        """Divide the model into slices, if nodes are the participants."""
        self.axis, self.size = exchange.over, fabric.size(exchange.over)
        self.held = sections(profile.tensors, slices_on(fabric, exchange))
        self.message = sum(section.nbytes for section in self.held)
        self.memory = 4 * self.message + (profile.nbytes if self.axis == "node" else 0)
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.random, self.free = np.random.default_rng(0), np.zeros(self.size)

    def step(self, clocks: Clocks, step: int) -> None:
        """Publish the model, and start exchanges of those that have none in flight."""
        speeds, numel = clocks.speeds, clocks.profile.numel
        clocks.spend(numel * 3 * speeds.copy)
        self._start(clocks)
        gather_slices(clocks, self.held, self.axis)
        clocks.spend(numel * speeds.copy if self.axis == "node" else 0.0)

    def _start(self, clocks: Clocks) -> None:
        by_nodes, fabric = self.axis == "node", clocks.fabric
        now = clocks.now.max(axis=1) if by_nodes else clocks.now.reshape(-1)
        idle = np.arange(0, self.size, 2)
        idle = idle[self.free[idle] <= now[idle]]
        idle = idle[np.argsort(now[idle], kind="stable")]
        partners = 1 + 2 * self.random.integers(self.size // 2, size=len(idle))
        many = fabric.ranks_per_node if by_nodes else 1
        counted, crossing = np.zeros(self.size), np.zeros(fabric.nodes)
        for one, other in zip(idle.tolist(), partners.tolist(), strict=True):
            begin = max(now[one], self.free[other])
            home = [p if by_nodes else p // fabric.ranks_per_node for p in (one, other)]
            if home[0] == home[1]:
                self.free[[one, other]] = begin + 3 * fabric.inside(self.message)
            else:
                crossing[home] += many * self.message
                path = fabric.way(*home)
                wires = 2 * path.latency + path.seconds(many * self.message)
                lost = clocks.confirm((one, other), begin, many * self.message, path)
                self.free[[one, other]] = begin + wires + lost
            counted[[one, other]] += self.message
            counted[one] += WORD
        clocks.crossed += crossing
        shape = clocks.now.shape
        clocks.count(self.axis, counted[:, None] if by_nodes else counted.reshape(shape))
