"""Eight connections carry four times what one does where packets are lost, and no less nearby."""

import os
from functools import partial

from torch import nn
from torch.optim import SGD

from bench.harness import GOAL, Bench, Result, at_least, attached, command
from bench.harness.attached import Attached, Build
from bench.harness.pause import paused
from bench.harness.training import Training, times
from offbeat.transport.links import CONNECTIONS

WIDE = 8
PAUSE, WIDTH, RATE = 0.05, 448, "250mbit"  # seconds of a step, and 6.4 MB
PLACES = {  # steps of a turn, options of the links, the goal
    "far": (8, {"latency": "50ms", "loss": "0.1%"}, 4.0),
    "near": (20, {}, 0.95),
}
# An all-reduce, gossip and an outer exchange in every step or every second one.
METHODS = ("ddp(bucket_mb=100)", "sgp", "diloco(every=2)")
WAYS = tuple(f"{method} {count}" for method in METHODS for count in (1, WIDE))
HEADINGS = ("network", "method", "1 connection", f"{WIDE} connections", "times faster")
BENCH = Bench(name="internet/width", minutes=9)


def attach(way: str, model: nn.Module, build: Build) -> Attached:
    """A method, and its number of connections."""
    method, os.environ[CONNECTIONS] = way.split()
    return attached.attach(method, model, build)


@command(BENCH)
def app() -> Result:
    """Train between two nodes on both networks."""
    rows, claims, found = [], [], {}
    for network, (steps, far, goal) in PLACES.items():
        turns = Training(
            partial(paused, PAUSE, WIDTH), WAYS, steps, rounds=1, lead=2,
            optimizer=partial(SGD, lr=1e-4), attach=attach,
        )  # fmt: skip
        each, gains = times(turns, 2, RATE, **far), {}
        for method in METHODS:
            one, wide = (each[f"{method} {count}"].step for count in (1, WIDE))
            gain = (one - PAUSE) / (wide - PAUSE)
            gains[gain] = method
            rows.append((network, method, f"{one:.2f} s", f"{wide:.2f} s", f"{gain:.2f}"))
        least, found[network] = min(gains), each
        text = f"time beside computing, 1 connection over {WIDE}, {network}"
        claims.append(at_least(text, least, goal, "{:.2f}", f"({gains[least]})", GOAL))
    title = "Two nodes, 250 Mbit/s, 6.4 MB; far: 100 ms there and back, 0.1 % loss"
    return Result(title, HEADINGS, rows, claims, found)
