"""``ad_psgd``: pairs of participants average in a thread, and nobody waits."""

from typing import final

import numpy as np

from offbeat.methods import PairAverage
from offbeat.plan.clocks import Array, Clocks
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
        wide = sum(
            s.nbytes for s in sections(profile.tensors, slices_on(fabric, exchange), wide=True)
        )
        self.memory = 3 * self.message + wide + (profile.nbytes if self.axis == "node" else 0)
        self.links = fabric.nodes
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.random, self.free = np.random.default_rng(0), np.zeros(self.size)
        self.carried = np.zeros(self.links)  # when the link of each node has passed all messages
        # Of the last exchange of each participant with an even number: with whom, when it begins
        # and ends, and how much of it has passed.
        self.partner = np.ones(len(range(0, self.size, 2)), int)
        self.begun, self.ended = np.zeros((2, len(self.partner)))
        self.passed = np.ones(len(self.partner))

    def step(self, clocks: Clocks, step: int) -> None:
        """Publish the model, and start exchanges of those that have none in flight."""
        speeds, numel = clocks.speeds, clocks.profile.numel
        clocks.spend(numel * 3 * speeds.copy)
        self._count(clocks)
        self._start(clocks)
        gather_slices(clocks, self.held, self.axis)
        clocks.spend(numel * speeds.copy if self.axis == "node" else 0.0)

    def _count(self, clocks: Clocks) -> None:
        """Count what has passed since the last step: an exchange may take many."""
        now = self._now(clocks)[::2]
        taken = np.maximum(self.ended - self.begun, 1e-12)
        passed = np.clip((now - self.begun) / taken, self.passed, 1.0)
        each = (passed - self.passed) * self.message
        self.passed = passed
        counted, fabric = np.zeros(self.size), clocks.fabric
        np.add.at(counted, np.arange(0, self.size, 2), each)
        np.add.at(counted, self.partner, each)
        by_nodes = self.axis == "node"
        homes = np.arange(self.size) // (1 if by_nodes else fabric.ranks_per_node)
        many = fabric.ranks_per_node if by_nodes else 1
        is_out = homes[::2] != homes[self.partner]
        for ends in (homes[::2], homes[self.partner]):
            np.add.at(clocks.crossed, ends[is_out], many * each[is_out])
        shape = clocks.now.shape
        clocks.count(self.axis, counted[:, None] if by_nodes else counted.reshape(shape))

    def _now(self, clocks: Clocks) -> Array:
        return clocks.now.max(axis=1) if self.axis == "node" else clocks.now.reshape(-1)

    def _start(self, clocks: Clocks) -> None:
        by_nodes, fabric, now = self.axis == "node", clocks.fabric, self._now(clocks)
        idle = np.arange(0, self.size, 2)
        idle = idle[self.free[idle] <= now[idle]]
        idle = idle[np.argsort(now[idle], kind="stable")]
        partners = 1 + 2 * self.random.integers(self.size // 2, size=len(idle))
        many = fabric.ranks_per_node if by_nodes else 1
        requests = np.zeros(self.size)
        for one, other in zip(idle.tolist(), partners.tolist(), strict=True):
            begin, end = max(now[one], self.free[other]), 0.0
            home = [p if by_nodes else p // fabric.ranks_per_node for p in (one, other)]
            if home[0] == home[1]:
                end = begin + 3 * fabric.inside(self.message)
            else:
                path = fabric.way(*home)
                begin = max(begin, *self.carried[home])  # other ranks of both nodes send, too
                self.carried[home] = begin + path.per_byte * many * self.message
                wires = 2 * path.latency + path.seconds(many * self.message)
                end = begin + wires + clocks.confirm((one, other), begin, many * self.message, path)
            self.free[[one, other]] = end
            self.partner[one // 2], self.passed[one // 2] = other, 0.0
            self.begun[one // 2], self.ended[one // 2] = begin, end
            requests[one] += WORD
        clocks.count(
            self.axis, requests[:, None] if by_nodes else requests.reshape(clocks.now.shape)
        )
