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
        slices, self.nodes = slices_on(fabric, exchange), fabric.nodes
        self.held = sections(profile.tensors, slices)
        self.message = sum(section.nbytes for section in self.held)
        wide = sum(section.nbytes for section in sections(profile.tensors, slices, wide=True))
        self.memory = 3 * self.message + wide + (profile.nbytes if self.axis == "node" else 0)
        # The node of each participant, and how many ranks of it send in an exchange.
        self.home = np.arange(self.size) // (self.size // fabric.nodes)
        self.many = fabric.ranks_per_node if self.axis == "node" else 1
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.random, self.free = np.random.default_rng(0), np.zeros(self.size)
        self.carried = np.zeros(self.nodes)  # when the link of each node has passed all messages
        # Of the last exchange of each participant with an even number: with whom, when it begins
        # and ends, and how much of it has passed.
        self.partner = np.ones(-(-self.size // 2), int)
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
        now, least = self._now(clocks)[::2], 1e-12  # seconds
        passed = (now - self.begun) / np.maximum(self.ended - self.begun, least)
        passed = np.clip(passed, self.passed, 1.0)
        each, self.passed = (passed - self.passed) * self.message, passed
        counted, is_out = np.zeros(self.size), self.home[::2] != self.home[self.partner]
        for ends in (np.arange(0, self.size, 2), self.partner):
            np.add.at(counted, ends, each)
            np.add.at(clocks.crossed, self.home[ends[is_out]], self.many * each[is_out])
        clocks.count(self.axis, self._by_rank(counted, clocks))

    def _now(self, clocks: Clocks) -> Array:
        return clocks.now.max(axis=1) if self.axis == "node" else clocks.now.reshape(-1)

    def _by_rank(self, found: Array, clocks: Clocks) -> Array:
        return found[:, None] if self.axis == "node" else found.reshape(clocks.now.shape)

    def _start(self, clocks: Clocks) -> None:
        fabric, now, nbytes = clocks.fabric, self._now(clocks), self.many * self.message
        idle = np.arange(0, self.size, 2)
        idle = idle[self.free[idle] <= now[idle]]
        idle = idle[np.argsort(now[idle], kind="stable")]
        partners = 1 + 2 * self.random.integers(self.size // 2, size=len(idle))
        requests = np.zeros(self.size)
        for one, other in zip(idle.tolist(), partners.tolist(), strict=True):
            begin, home = max(now[one], self.free[other]), self.home[[one, other]]
            if home[0] == home[1]:
                end = begin + 3 * fabric.inside(self.message)
            else:
                path = fabric.way(*home)
                begin = max(begin, *self.carried[home])  # other ranks of both nodes send, too
                self.carried[home] = begin + path.per_byte * nbytes
                wires = 2 * path.latency + path.seconds(nbytes)
                end = begin + wires + clocks.confirm((one, other), begin, nbytes, path)
            self.free[[one, other]] = end
            self.partner[one // 2], self.passed[one // 2] = other, 0.0
            self.begun[one // 2], self.ended[one // 2] = begin, end
            requests[one] += WORD
        clocks.count(self.axis, self._by_rank(requests, clocks))
