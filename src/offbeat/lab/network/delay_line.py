"""The delay line: carries frames between TAP devices, some of them after a latency.

This file is run by a bare interpreter: it must not import anything of offbeat. Its argument is a
JSON list of directions, each [from, to, latency, jitter, loss] with two file descriptors. For each
byte on its standard input it prints its counters as one line of JSON; it ends with that input.

A frame holds up to 64 KiB, as the kernel's TCP makes them, so that 250 Mbit/s are 1,000 frames per
second. With random loss it holds one packet of 1,500 bytes, and 250 Mbit/s are 21,000 frames.
"""

import contextlib
import gc
import json
import os
import random
import select
import sys
import time
from collections import deque
from math import inf

FRAME = 10 + 14 + 65536  # the longest: headers of the device and of Ethernet, and an IP packet
LIMIT = 2**28  # bytes on the way in one direction; more are dropped (links without a rate)
BATCH = 64  # frames that are read from a device before others are served
# Pause between two rounds while frames arrive in quick succession. One round then serves many
# frames, which halves the CPU time at 20,000 frames per second.
PAUSE = 2e-4
# What the way through two devices and the wake-ups of this process and of the receiver add. From
# 0.1 to 0.3 ms in virtual machines, less elsewhere.
TRANSIT = 2e-4
LATE = 1e-3  # a frame is late if it leaves the line later than this, or 5 % of the latency


class Direction:
    """The frames on their way to the device ``target``, in their order."""

    __slots__ = (
        *("dropped", "frames", "held", "jitter", "late", "late_after", "latency", "loss"),
        *("queue", "random", "target", "turn", "turns"),
    )

    def __init__(self, target: int, latency: float, jitter: float, loss: float, seed: int) -> None:
        """Start without frames; ``seed`` decides which frames are lost."""
        self.target, self.jitter, self.loss = target, jitter, loss
        self.latency = max(0.0, latency - TRANSIT)
        self.late_after = max(LATE, latency / 20)
        self.queue: deque[tuple[float, bytes]] = deque()
        self.random = random.Random(seed).random
        self.frames = self.held = self.late = self.dropped = 0
        self.turn, self.turns = 0.0, (0.0, 0.0)  # the jitter's next turn, and at the last and next

    def accept(self, frame: bytes) -> None:
        """Lose a frame, or let it arrive after the latency."""
        self.frames += 1
        if self.loss and self.random() < self.loss:
            return
        if not self.latency:
            self.send(frame)
        elif self.held + len(frame) > LIMIT:
            self.dropped += 1
        else:
            now = time.monotonic()
            due = now + self.latency + (self.wander(now) if self.jitter else 0.0)
            self.held += len(frame)
            self.queue.append((due, frame))

    def wander(self, now: float) -> float:
        """Return the present deviation from the latency.

        It moves between random values, at most half as fast as time: frames keep their order.
        """
        period = 4 * self.jitter
        if now >= self.turn:
            self.turn = now + period
            self.turns = (self.turns[1], self.jitter * (2 * self.random() - 1))
        share = (self.turn - now) / period
        return share * self.turns[0] + (1 - share) * self.turns[1]

    def deliver(self, now: float) -> float:
        """Send the frames that are due; return when the next one is, infinity for none."""
        queue = self.queue
        while queue:
            due = queue[0][0]
            if due > now:
                return due
            frame = queue.popleft()[1]
            self.held -= len(frame)
            self.late += now - due > self.late_after
            self.send(frame)
        return inf

    def send(self, frame: bytes) -> None:
        """Write a frame to the device; a link that is down loses it."""
        with contextlib.suppress(OSError):
            os.write(self.target, frame)


def read(device: int, direction: Direction) -> int:
    """Accept the frames that wait in a device; return their number."""
    for count in range(BATCH):
        try:
            frame = os.read(device, FRAME)
        except OSError:  # no more
            return count
        direction.accept(frame)
    return BATCH


def report(directions: dict[int, Direction], start: float) -> str:
    """Return the counters since the start as JSON."""
    counters = {
        name: sum(getattr(direction, name) for direction in directions.values())
        for name in ("frames", "late", "dropped")
    }
    counters |= {"cpu": time.process_time(), "wall": time.monotonic() - start}
    return json.dumps(counters)


def carry(directions: dict[int, Direction]) -> None:
    """Carry frames until the standard input ends."""
    delayed = [direction for direction in directions.values() if direction.latency]
    devices, start, taken = [0, *directions], time.monotonic(), 0
    while True:
        now = time.monotonic()
        due = min((direction.deliver(now) for direction in delayed), default=inf)
        if taken > 1:
            time.sleep(PAUSE)
            wait = 0.0
        else:
            wait = min(1.0, max(0.0, due - time.monotonic()))
        ready = select.select(devices, [], [], wait)[0]
        if ready and ready[0] == 0:
            if not os.read(0, 1):
                return
            print(report(directions, start), flush=True)
            del ready[0]
        taken = sum(read(device, directions[device]) for device in ready)


def main(settings: list[list[float]]) -> None:
    """Carry frames, before other processes if the user may; descriptors come first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()  # nothing here has circles
    directions = {}
    for seed, (source, target, latency, jitter, loss) in enumerate(settings):
        os.set_blocking(int(source), False)
        directions[int(source)] = Direction(int(target), latency, jitter, loss, seed)
    carry(directions)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
