"""What a method sends and connects grows as stated: bytes and sockets by number of ranks.

Worlds of threads up to 32 ranks; beyond, the laws that the measured figures follow. Memory is what
the models of the methods say that are behind ``offbeat plan``.
"""

import threading
from dataclasses import dataclass

import torch
from rich.progress import track
from torch import nn
from torch.optim import SGD

import offbeat
from bench.harness import Bench, Claim, Result, command, console
from bench.scale.attach import WAIT, sockets
from bench.scale.laws import EVERY, LAWS, Law
from offbeat.plan import Fabric, Parameter, Profile, Speeds, predict
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

SIZES = (4, 8, 16, 32)
LARGE = 1024
SETTLE, STEPS = EVERY, 2 * EVERY  # whole intervals: those that are not measured, and those that are
HEADINGS = (
    "method", *(f"bytes, {n} ranks" for n in SIZES), f"bytes, {LARGE:,}, modelled",
    "law, in models, modelled", f"sockets, {SIZES[-1]} ranks", f"sockets, {LARGE:,}, modelled",
    f"serial messages, {LARGE:,}, modelled", f"memory, {SIZES[-1]} ranks, modelled",
    f"memory, {LARGE:,}, modelled",
)  # fmt: skip
BENCH = Bench(name="scale/growth", minutes=3)


@dataclass(frozen=True)
class Counted:
    """Of one method in one world: the largest rank's models a step, and sockets per rank."""

    method: str
    ranks: int
    models: float
    sockets: float

    @property
    def law(self) -> Law:
        return LAWS[self.method]

    @property
    def error(self) -> float:
        """The relative error of the law."""
        return abs(self.models / self.law.bytes(self.ranks) - 1)

    @property
    def excess(self) -> float:
        """How many sockets there are beside those of the law."""
        return abs(self.sockets - self.law.sockets(self.ranks))


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


def predicted(method: str, ranks: int) -> tuple[float, float]:
    """What a rank allocates and what it sends per step, in models, by ``offbeat.plan``."""
    layers = [Parameter(name, p.numel()) for name, p in network().named_parameters()]
    profile = Profile.by_size(layers, 0.01, 0.02, 0.0, Speeds.of_bandwidth(1e10))
    local = LAWS[method].local
    fabric = Fabric(nodes=ranks // local, rate=1e9, ranks_per_node=local)
    size = 4 * sum(layer.numel for layer in layers)
    found = predict(offbeat.algorithm(method), profile, fabric)
    return found.memory / size, sum(found.sent.values()) / size


def measure(method: str, ranks: int) -> Counted:
    """Train a world of threads for two intervals, after one that is not measured."""
    barrier, before, found = threading.Barrier(ranks, timeout=WAIT), sockets(), set[str]()

    def work(world: World) -> float:
        model, given = network(), offbeat.algorithm(method)
        optimizer = SGD(model.parameters(), lr=0.01)
        replica = offbeat.replicate(model, given, mesh=world, optimizer=optimizer)
        if barrier.wait() == 0:
            found.update(sockets() - before)
        sent = []
        for step in range(SETTLE + STEPS):
            if step == SETTLE:
                sent.append(replica.stats()["total"]["bytes_sent"])
            model(torch.randn(2, 256)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        sent.append(replica.stats()["total"]["bytes_sent"])
        barrier.wait()
        replica.detach()
        size: int = sum(p.nbytes for p in model.parameters())
        return (sent[1] - sent[0]) / STEPS / size

    nodes = torch.arange(ranks).reshape(-1, LAWS[method].local).tolist()
    models = max(ThreadWorld(nodes=nodes).run(work, timeout=WAIT))
    return Counted(method, ranks, models, len(found) / ranks)


@command(BENCH)
def app() -> Result:
    cases = [(method, ranks) for method in LAWS for ranks in SIZES]
    worlds = {case: measure(*case) for case in track(cases, "worlds", console=console)}
    rows = [
        (
            method, *(f"{worlds[method, n].models:.3g}" for n in SIZES),
            f"{law.bytes(LARGE):.3g}", law.formula,
            f"{worlds[method, SIZES[-1]].sockets:.1f}", f"{law.sockets(LARGE):,.0f}",
            f"{law.hops(LARGE):,}", *(f"{predicted(method, n)[0]:.3g}" for n in (SIZES[-1], LARGE)),
        )
        for method, law in LAWS.items()
    ]  # fmt: skip
    # ad_psgd exchanges when partners have time.
    exact = [each for each in worlds.values() if each.method != "ad_psgd"]
    worst = max(exact, key=lambda each: each.error / each.law.tolerance)
    excess, allowed = max(each.excess for each in worlds.values()), worst.law.tolerance
    text = f"bytes follow the law (worst: {worst.method} at {worst.ranks})"
    claims = [
        Claim(text, f"within {allowed:.0%}", f"{worst.error:.1%}", worst.error <= allowed),
        Claim("sockets follow the law", "exactly", f"{excess:.1f} more", excess < 0.5),
    ]
    title = "Models of bytes sent per step and rank, and sockets per rank"
    return Result(title, HEADINGS, rows, claims, [*worlds.values()])
