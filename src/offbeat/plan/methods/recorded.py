"""Any exchange of parameters: one rank is recorded, and what it does is played for all."""

from collections.abc import Sequence
from itertools import groupby
from typing import final

import numpy as np

from offbeat.exchange import Algorithm, ParameterExchange
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric, Path
from offbeat.plan.methods.slot import StepTimes
from offbeat.plan.profile import Profile
from offbeat.plan.record import record
from offbeat.transport.recorded import Event

PERIODS = 3  # that are recorded; the first may differ, and is not repeated
WORDS = 8  # bytes that a copy reads and writes for one value


@final
class RecordedTimes(StepTimes):
    """Models an exchange without a model of its own, as if all ranks did what the first one does.

    Launches take the times of :class:`Clocks`, waits join the clocks with them, and passes over
    memory run at the speed of copies. Messages leave all ranks over the same distance. Recording
    takes the longer, the more messages a rank sends: a method that sends to all others in turn
    needs a model of its own for thousands of ranks.
    """

    def __init__(self, exchange: ParameterExchange, profile: Profile, fabric: Fabric) -> None:
        """Record the exchange in a world like this one."""
        self.period = self.lead = int(getattr(exchange, "every", 1))
        steps = PERIODS * self.period
        made = record(Algorithm(parameters=exchange), profile.tensors, fabric.layout, steps)
        self.memory, self.steps, self.first = float(made.memory), made.steps, made.first
        self.fabric = fabric
        self.restart()

    def restart(self) -> None:
        """Begin with nothing in flight."""
        self.arrivals: dict[int, Array] = {}
        self.shift = 0  # what is added to the numbers of launches when steps repeat

    def step(self, clocks: Clocks, step: int) -> None:
        """Play the events of this step, or of one like it."""
        index = step
        if step >= len(self.steps):
            again = (step - self.period) % (len(self.steps) - self.period)
            index = self.period + again
            if again == 0:
                self.shift += self.first[-1] - self.first[self.period]
        clocks.now = self._play(self.steps[index], clocks.now, clocks)

    def _play(self, events: Sequence[Event], now: Array, clocks: Clocks) -> Array:
        """Return when each rank has gone through ``events``, from ``now`` on."""
        for together, group in groupby(events, key=lambda event: event.kind in ("send", "receive")):
            if together:
                messages = list(group)
                arrival = self._messages(messages, now, clocks)
                self.arrivals |= {event.number + self.shift: arrival for event in messages}
                continue
            for event in group:
                if event.kind == "pass":
                    now = now + event.nbytes * clocks.speeds.copy / WORDS * clocks.pace
                elif event.kind == "wait":
                    arrived = self.arrivals.pop(event.number + self.shift, now)
                    now = np.maximum(now, arrived)
                else:
                    self.arrivals[event.number + self.shift] = self._launch(event, now, clocks)
        return now

    def _launch(self, event: Event, now: Array, clocks: Clocks) -> Array:
        """Return when a collective or a job ends that begins ``now``."""
        if event.kind == "all_reduce":
            return clocks.all_reduce(now, event.nbytes, event.axis)
        if event.kind == "all_gather":
            return clocks.all_gather(now, event.nbytes, event.axis)
        if event.kind == "job":
            return self._play(event.parts, now, clocks)
        clocks.count(event.axis, event.nbytes)
        hops = (self.fabric.size(event.axis) - 1).bit_length()
        once = self.fabric.hop(event.axis, event.nbytes)
        return clocks.collective(now, hops * once, event.axis)

    def _messages(self, messages: Sequence[Event], now: Array, clocks: Clocks) -> Array:
        """Return when messages have come that all ranks send over the distances of the first."""
        axis, fabric = messages[0].axis, self.fabric
        latency, carried, inside, ready = 0.0, {"send": 0.0, "receive": 0.0}, 0.0, now
        leaving = fabric.leaving(axis)
        for event in messages:
            crossing, is_sent = leaving[event.peer - 1], event.kind == "send"
            if crossing:
                path = fabric.path(axis, event.peer)
                latency = max(latency, path.latency)
                carried[event.kind] += path.per_byte * event.nbytes
            if is_sent:
                clocks.count(axis, event.nbytes)
                clocks.crossed += crossing * event.nbytes
                inside += event.nbytes
        flat = now if axis == "node" else now.reshape(-1)
        for distance in {event.peer for event in messages}:
            for turned in (distance, -distance):
                ready = np.maximum(ready, np.roll(flat, turned, axis=0).reshape(now.shape))
        seconds = max(carried.values())
        if not seconds:
            return ready + 2 * fabric.inside(inside)
        key, nbytes = ("messages", messages[0].peer), max(event.nbytes for event in messages)
        path = Path(latency, seconds / nbytes)
        return (
            ready
            + latency
            + path.seconds(nbytes)
            + clocks.confirm(key, float(ready.max()), nbytes, path)
        )
