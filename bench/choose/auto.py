"""``auto`` beside each of its candidates, on slow, far and fast links, and with a straggler."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from math import ceil
from os import environ
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD

import offbeat
from bench.harness import GOAL, Bench, Claim, Result, at_most, command
from bench.harness.attached import Attached
from bench.harness.pause import paused
from bench.harness.ranks import on_nodes, seconds_together
from offbeat.kernels.dispatch import load_kernels
from offbeat.lab.network.links import LinkOptions
from offbeat.lab.network.shaping import bucket
from offbeat.lab.network.wire import Wire, parse_rate
from offbeat.recipes.auto import CANDIDATES

WORKERS, PAUSE, WIDTH = 4, 0.04, 156  # seconds of computing, and 0.8 MB
RATES = "25mbit,100mbit,1gbit"
LATENCIES, SLOW, NEAR, CELLS = (None, "25ms"), (1.0, 2.0), 1.1, 12
# Steps of a recipe after a switch, at least; turns of all; seconds in which TCP's windows grow.
LEAD, TURNS, SETTLE = 8, 3, 2.0
RUN, START, WINDOW = 1000, 64, 64  # steps of a run: the first are timed, and some for the others
HEADINGS = ("links", *CANDIDATES, "auto", "over the best", "its last choice")
BENCH = Bench(name="choose/auto", minutes=10, full_minutes=35)


@dataclass(frozen=True)
class Cell:
    rate: str
    latency: str | None
    slow: float  # how many times as long the first worker computes
    drop: str | None = None  # the rate of the second half

    def __str__(self) -> str:
        rate = self.rate if self.drop is None else f"{self.rate}, then {self.drop}"
        far = "" if self.latency is None else f", {self.latency}"
        return rate + far + ("" if self.slow == 1 else f", one {self.slow:g} times slower")


@dataclass(frozen=True)
class Raced:
    """Seconds of a run under each candidate and under ``auto``, and what this one has decided."""

    fixed: dict[str, float]
    auto: float
    decisions: list[dict[str, Any]]
    switches: dict[str, list[float]]  # to a candidate and back, in steps of ddp

    @property
    def over_best(self) -> float:
        return self.auto / min(self.fixed.values())


class Trained:
    """A model that pauses, on this rank."""

    def __init__(self, text: str, cell: Cell) -> None:
        self.task = paused(PAUSE * (cell.slow if dist.get_rank() == 0 else 1.0), WIDTH)
        model, optimizer = self.task.model, SGD(self.task.model.parameters(), lr=1e-3)
        self.replica = offbeat.replicate(model, offbeat.algorithm(text), optimizer=optimizer)
        self.run = Attached(model, optimizer, model, after=lambda _: self.replica.step())

    def seconds(self, steps: int, first: Callable[[], object] = lambda: None) -> float:
        """Of some steps of the slowest rank, and of what it does ``first``."""
        step = partial(self.run.step, self.task.loss)
        return seconds_together(lambda: [first(), *(step() for _ in range(steps))])


def fixed(cell: Cell) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Seconds of a run under each candidate, and what a switch to it and back costs, in steps."""
    turns = [in_turn(cell) for _ in range(TURNS)]
    starts, steps, spans = zip(*turns, strict=True)
    seconds = {t: fmean(starts) + RUN * fmean(each[t] for each in steps) for t in CANDIDATES}
    # Of the quietest times: other load only adds.
    step = {text: min(each[text] for each in steps) for text in CANDIDATES}
    ddp, costs = step[CANDIDATES[0]], dict[str, list[float]]()
    for text in spans[0]:
        into, back = map(min, zip(*(each[text] for each in spans), strict=True))
        rests = into - lead(text) * step[text], back - LEAD * ddp
        costs[text] = [max(0.0, rest) / ddp for rest in rests]
    return seconds, costs


def in_turn(cell: Cell) -> tuple[float, dict[str, float], dict[str, tuple[float, float]]]:
    """Seconds of a start, of a step under each candidate, and of switches to it and back."""
    first, *others = CANDIDATES
    run, steps, spans = Trained(first, cell), dict[str, float](), dict[str, tuple[float, float]]()
    began = run.seconds(LEAD)
    steps[first] = run.seconds(LEAD) / LEAD
    for text in others:
        into = run.seconds(lead(text), first=partial(run.replica.switch, text))
        run.seconds(lead(text) * ceil(SETTLE / into))
        steps[text] = run.seconds(lead(text)) / lead(text)
        run.seconds(LEAD // 2)  # or models would just have been averaged
        spans[text] = into, run.seconds(LEAD, first=partial(run.replica.switch, first))
    run.replica.detach()
    return began - LEAD * steps[first], steps, spans  # first: connections, which all runs open


def lead(text: str) -> int:
    """Steps of a recipe after a switch: as many as hold an exchange."""
    return max(LEAD, getattr(offbeat.algorithm(text).parameters, "every", 1))


def race(cell: Cell) -> Raced:
    """A run under every candidate and under ``auto``, or with a drop under ``auto`` alone."""
    seconds_of, switches = fixed(cell) if cell.drop is None else ({}, {})
    run = Trained("auto", cell)
    if cell.drop is None:
        seconds = run.seconds(START) + of_rest(run.seconds(WINDOW), run.replica.stats()["auto"])
    else:
        seconds = run.seconds(RUN // 2)
        limit(cell.drop)
        seconds += run.seconds(RUN // 2)
    found = Raced(seconds_of, seconds, run.replica.stats()["auto"], switches)
    run.replica.finish()
    run.replica.detach()
    return found


def of_rest(seconds: float, decisions: list[dict[str, Any]]) -> float:
    """Of the steps after the start, from those of a window, with all decisions that fall due."""
    within = sum(each["cost"] for each in decisions if each["step"] > START)
    last = decisions[-1]
    per_step = (seconds - within) / WINDOW + last["cost"] / (last["next"] - last["step"])
    return (RUN - START) * per_step


def races(cells: list[Cell]) -> list[Raced]:
    load_kernels(torch.device("cpu"))  # as ``auto`` does before it trains
    return [race(cell) for cell in cells]


def limit(rate: str) -> None:
    """Let this node send at another rate."""
    (add,) = bucket(environ["GLOO_SOCKET_IFNAME"], Wire(parse_rate(rate)), 0.0)
    subprocess.run(["tc", *add.replace("add", "replace").split()], check=True)


def measured(rates: list[str]) -> dict[Cell, Raced]:
    """All cells, and for each two rates one whose links fall from the higher one half way."""
    found = {}
    for rate, latency in product(rates, LATENCIES):
        cells = [Cell(rate, latency, slow) for slow in SLOW]
        far: LinkOptions = {} if latency is None else {"latency": latency}
        found |= dict(zip(cells, on_nodes(races, cells, WORKERS, rate=rate, **far), strict=True))
    for after, before in pairwise(rates):
        cell = Cell(before, None, 1.0, after)
        (raced,) = on_nodes(races, [cell], WORKERS, rate=before)
        halves = [found[replace(cell, rate=rate, drop=None)].fixed for rate in (before, after)]
        found[cell] = replace(raced, fixed={t: fmean(h[t] for h in halves) for t in CANDIDATES})
    return found


@command(BENCH, full={"rates": RATES}, rates="Of every node's link, in increasing order.")
def app(rates: str = "1gbit") -> Result:
    """Time a run under every candidate and under auto in each cell."""
    found = measured(rates.split(","))
    rows = [
        (
            str(cell), *(f"{each:.0f} s" for each in (*raced.fixed.values(), raced.auto)),
            f"{raced.over_best:.2f} x", raced.decisions[-1]["algorithm"],
        )
        for cell, raced in found.items()
    ]  # fmt: skip
    near = sum(raced.over_best <= NEAR for raced in found.values())
    raced = found[fast := Cell(rates.split(",")[-1], None, 1.0)]
    switches = [c for raced in found.values() for both in raced.switches.values() for c in both]
    claims = [
        Claim(f"auto takes at most {NEAR} times as long as the best", f"{CELLS} cells",
              f"{near} of {len(found)}, {max(r.over_best for r in found.values()):.3f} x at most",
              near >= min(CELLS, len(found)), GOAL),
        at_most(f"{fast}: auto over ddp", raced.auto / raced.fixed["ddp()"], 1.02, source=GOAL),
        at_most("steps of ddp that a switch costs", max(switches), 1.0, "{:.2f}",
                f"(median {median(switches):.2f})", source=GOAL),
    ]  # fmt: skip
    title = f"Seconds of {RUN} steps, {WORKERS} workers, {1e3 * PAUSE:g} ms of computing, 0.8 MB"
    return Result(title, HEADINGS, rows, claims, picture={str(c): r for c, r in found.items()})
