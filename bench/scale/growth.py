"""What a method sends and connects grows as stated: bytes and sockets by number of ranks.

Worlds of threads up to 32 ranks; beyond, the laws that the measured figures follow. Memory is what
the models of the methods say that are behind ``offbeat plan``.
"""

import threading
from itertools import product

import torch
from torch import nn
from torch.optim import SGD

import offbeat
from bench.harness import Bench, Claim, Result, command
from bench.scale.attach import WAIT, sockets
from bench.scale.laws import EVERY, LAWS
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


def measure(method: str, ranks: int) -> tuple[float, float]:
    """Models that a rank sends in a step at most, and its sockets, in a world of threads."""
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
    return models, len(found) / ranks


@command(BENCH)
def app() -> Result:
    found = {case: measure(*case) for case in product(LAWS, SIZES)}
    rows = [
        (
            method, *(f"{found[method, n][0]:.3g}" for n in SIZES), f"{law.bytes(LARGE):.3g}",
            law.formula, f"{found[method, SIZES[-1]][1]:.1f}", f"{law.sockets(LARGE):,.0f}",
            f"{law.hops(LARGE):,}", *(f"{predicted(method, n)[0]:.3g}" for n in (SIZES[-1], LARGE)),
        )
        for method, law in LAWS.items()
    ]  # fmt: skip
    errors = {
        (method, n): abs(models / LAWS[method].bytes(n) - 1)
        for (method, n), (models, _) in found.items()
        if method != "ad_psgd"  # which exchanges when partners have time
    }
    worst = max(errors, key=lambda case: errors[case] / LAWS[case[0]].tolerance)
    error, allowed = errors[worst], LAWS[worst[0]].tolerance
    excess = max(abs(held - LAWS[method].sockets(n)) for (method, n), (_, held) in found.items())
    text = f"bytes follow the law (worst: {worst[0]} at {worst[1]})"
    claims = [
        Claim(text, f"within {allowed:.0%}", f"{error:.1%}", error <= allowed),
        Claim("sockets follow the law", "exactly", f"{excess:.1f} more", excess < 0.5),
    ]
    title = "Models of bytes sent per step and rank, and sockets per rank"
    measured = {f"{method}, {n}": figures for (method, n), figures in found.items()}
    return Result(title, HEADINGS, rows, claims, measured)
