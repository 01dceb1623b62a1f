"""Profiles and networks for the tests of plans."""

from dataclasses import asdict

import numpy as np

import offbeat
from offbeat.lab.check import PAYLOAD
from offbeat.plan import Fabric, Parameter, Profile, Speeds, Stragglers, predict
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.methods.choice import slots_of
from offbeat.plan.predict import play_run

INSTANT = Speeds(**dict.fromkeys(asdict(Speeds.of_bandwidth(1.0)), 0.0))  # passes take no time
ALPHA, RATE = 1e-3, 1e7  # seconds of latency, bytes per second


def profile(*numels: int, speeds: Speeds = INSTANT, ready: tuple[float, ...] = ()) -> Profile:
    """Layers of these sizes: 0.1 s forward, 0.2 s backward, 0.05 s for the optimizer."""
    parameters = [Parameter(f"{i}.w", numel) for i, numel in enumerate(numels)]
    made = Profile.by_size(parameters, 0.1, 0.2, 0.05, speeds)
    if not ready:
        return made
    timed = [Parameter(p.name, p.numel, ready=r) for p, r in zip(parameters, ready, strict=True)]
    return Profile(tuple(timed), 0.1, 0.2, 0.05, speeds)


def fabric(nodes: int, each: int = 1, **more: float | bool) -> Fabric:
    """Links that carry ``RATE`` bytes of payload per second."""
    given: dict[str, float | bool] = {"rate": 8 * RATE / PAYLOAD, "latency": ALPHA, **more}
    return Fabric(nodes=nodes, ranks_per_node=each, **given)  # type: ignore[arg-type]


def seconds(text: str, found: Profile, where: Fabric, **stragglers: float) -> float:
    """The predicted time of a step."""
    return predict(offbeat.algorithm(text), found, where, Stragglers(**stragglers), 20).seconds  # type: ignore[arg-type]


def played(text: str, found: Profile, where: Fabric, factors: Array) -> Clocks:
    """All clocks after one step for each of the factors (steps, ranks)."""
    slots = slots_of(offbeat.algorithm(text), found, where)
    shape = len(factors), where.nodes, where.ranks_per_node
    return play_run(slots, found, where, factors.reshape(shape), 0)


def factors(steps: int, ranks: int, seed: int = 0) -> Array:
    """Steps of different lengths."""
    return np.random.default_rng(seed).lognormal(0.0, 0.4, (steps, ranks))
