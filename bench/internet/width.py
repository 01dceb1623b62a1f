"""One connection between two nodes against eight, far away and on a local network."""

import os
from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.optim import SGD

from bench.harness import GOAL, Bench, Claim, Result, attached, command
from bench.harness.attached import Attached, Build
from bench.harness.pause import paused
from bench.harness.training import Found, Training, times
from offbeat.lab.network.links import LinkOptions
from offbeat.transport.links import CONNECTIONS

WIDE, GOALS = 8, {"far": 4.0, "near": 0.95}
PAUSE, WIDTH, RATE = 0.05, 448, "250mbit"  # seconds of a step, and 6.4 MB
FAR: LinkOptions = {"latency": "50ms", "loss": "0.1%"}
# An all-reduce, gossip and an outer exchange in every step or every second one.
METHODS = ("ddp(bucket_mb=100)", "sgp", "diloco(every=2)")
WAYS = tuple(f"{method} {count}" for method in METHODS for count in (1, WIDE))
BENCH = Bench(
    name="internet/width",
    claim="Eight connections carry four times what one does where packets are lost, and no less "
    "on a local network",
    minutes=8,
)


def attach(way: str, model: nn.Module, build: Build) -> Attached:
    """A method, and its number of connections."""
    method, os.environ[CONNECTIONS] = way.split()
    return attached.attach(method, model, build)


def gains(found: Found) -> dict[str, float]:
    """How many times less time a step takes beside computing."""
    sending = {way: each.step - PAUSE for way, each in found.items()}
    return {method: sending[f"{method} 1"] / sending[f"{method} {WIDE}"] for method in METHODS}


def rows(network: str, found: Found) -> Iterator[tuple[str, ...]]:
    for method, gain in gains(found).items():
        steps = (f"{found[f'{method} {count}'].step:.2f} s" for count in (1, WIDE))
        yield network, method, *steps, f"{gain:.2f}"


def claims(network: str, found: Found) -> Iterator[Claim]:
    goal, (method, least) = GOALS[network], min(gains(found).items(), key=lambda item: item[1])
    yield Claim(f"time beside computing, 1 connection over {WIDE}, {network}",
                f"at least {goal:g}", f"{least:.2f} ({method})", least >= goal, GOAL)  # fmt: skip


@command(BENCH)
def app() -> Result:
    """Train between two nodes on both networks."""
    turns = partial(
        Training, partial(paused, PAUSE, WIDTH), WAYS, rounds=1, lead=2,
        optimizer=partial(SGD, lr=1e-4), attach=attach,
    )  # fmt: skip
    found = {"far": times(turns(4), 2, RATE, **FAR), "near": times(turns(20), 2, RATE)}
    title = "Two nodes, 250 Mbit/s, 6.4 MB; far: 100 ms there and back, 0.1 % loss"
    headings = ("network", "method", "1 connection", f"{WIDE} connections", "times faster")
    return Result.by_case(title, headings, found, rows, claims)
