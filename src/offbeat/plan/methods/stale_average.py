"""``daso``: a sum between nodes that travels while training goes on, and blocking phases."""

from dataclasses import replace
from typing import final

from offbeat.methods import Cycle, StaleAverage
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.slot import CALL, Section, StepTimes, sections
from offbeat.plan.profile import Profile
from offbeat.plan.record import bound_in

LONGEST = 1000  # steps that are played; a longer run is played with shorter phases


@final
class StaleAverageTimes(StepTimes):
    r"""Models :class:`offbeat.methods.StaleAverage`.

    .. math::
        f = \max_j t_j(k) + A(m), \qquad
        t_i(k + W) \leftarrow \max(t_i, f) + t_{node}(m)

    for P nodes: one rank of each node sends and receives the sum, and broadcasts the merged model
    in its node. Blocking phases average after every step, in 16 bits but for their first step.
    With ``total_steps`` a whole run is played, shortened to 1000 steps if it is longer; without,
    the cycling phase. The cadence does not change, since losses are not known.
    """

    def __init__(self, exchange: StaleAverage, profile: Profile, fabric: Fabric) -> None:
        """Shorten the phases of a long run."""
        self.exchange, self.axis, slices = exchange, exchange.over, fabric.ranks_per_node
        self.cycle = _shortened(exchange.cycle)
        self.period = self.cycle.total_steps or exchange.cycle.every
        held = sections(profile.tensors, slices, wide=True)
        self.whole = [Section(each.numel * slices, each.itemsize) for each in held]
        self.memory = bound_in(exchange, profile, fabric).nbytes()
        self.is_whole_run = self.cycle.total_steps is not None
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.due, self.arrivals = -1, list[Array]()

    def step(self, clocks: Clocks, step: int) -> None:
        """Merge the sum that is due, then average or start the next sum."""
        blocking, cadence = self.cycle.is_blocking(step), self.cycle.start
        if self.due >= 0 and (blocking or step >= self.due):
            self._merge(clocks)
        if self.cycle.ends_window(step):
            clocks.wait(clocks.all_gather(clocks.now, CALL, "world"))
        if blocking:
            self._average(clocks, exact=self.cycle.opens(step) or self.exchange.wire is None)
        elif self.due < 0 and self.cycle.sends(step, cadence):
            self._start(clocks)
            self.due = step + cadence.wait

    def _start(self, clocks: Clocks) -> None:
        clocks.spend(clocks.profile.numel * clocks.speeds.copy)
        for section in self.whole:
            self.arrivals.append(self._sum(clocks, section.nbytes))

    def _merge(self, clocks: Clocks) -> None:
        for arrival in self.arrivals:
            clocks.wait(arrival)
        self.arrivals, self.due = [], -1
        clocks.spend(clocks.profile.numel * clocks.speeds.add)
        self._broadcast(clocks)

    def _average(self, clocks: Clocks, exact: bool) -> None:
        speeds, numel = clocks.speeds, clocks.profile.numel
        clocks.spend(numel * (speeds.copy if exact else speeds.narrow))
        for section in self.whole:
            if exact:
                clocks.wait(self._sum(clocks, section.nbytes))
            else:
                self._halved(clocks, section.numel)
        clocks.spend(numel * speeds.add)
        self._broadcast(clocks)

    def _sum(self, clocks: Clocks, nbytes: int) -> Array:
        """All-reduce by one rank of each node; its share of a node's bytes is counted."""
        size, fabric = clocks.fabric.nodes, clocks.fabric
        clocks.count(self.axis, 2 * (size - 1) * nbytes // size / fabric.ranks_per_node)
        return clocks.ring(clocks.now, nbytes / size, self.axis, 2, together=1)

    def _halved(self, clocks: Clocks, numel: int) -> None:
        """Average in 16 bits, by staged exchanges of one rank of each node."""
        nbytes = 2 * -(-numel // clocks.fabric.nodes)
        clocks.wait(clocks.staged(clocks.now, nbytes, self.axis, rounds=2, together=1))

    def _broadcast(self, clocks: Clocks) -> None:
        if clocks.fabric.ranks_per_node > 1:
            for section in self.whole:
                clocks.wait(clocks.broadcast(clocks.now, section.nbytes))
        clocks.spend(clocks.profile.numel * clocks.speeds.copy)


def _shortened(cycle: Cycle) -> Cycle:
    """Return the phases of a run of at most 1000 steps, in proportion."""
    total = cycle.total_steps
    if total is None or total <= LONGEST:
        return cycle
    warm = sum(map(cycle.is_blocking, range(total // 2)))
    cool = sum(map(cycle.is_blocking, range(total // 2, total)))
    share = LONGEST / total
    return replace(
        cycle,
        total_steps=LONGEST,
        warmup_steps=round(warm * share),
        cooldown_steps=round(cool * share),
    )
