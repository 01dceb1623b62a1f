"""Exchanges of Adasum and an all-reduce of the same bytes, timed in turns on every rank."""

from collections.abc import Callable
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from bench.harness.ranks import seconds_together
from bench.harness.turns import in_turns
from offbeat.functional import Layout
from offbeat.methods.adasum.method import build_reduction, choose
from offbeat.methods.adasum.operands import Operands
from offbeat.methods.adasum.participants import Participants
from offbeat.methods.adasum.slice_layout import SliceLayout
from offbeat.transport.collectives import all_reduce
from offbeat.transport.group import Group
from offbeat.transport.handle import Handle
from offbeat.transport.links import Links
from offbeat.transport.messages import MessageRounds

LAYERS = 16
ALL_REDUCE = "all-reduce"
PASSES = "passes"  # of "gram" over memory, without messages
MESSAGES = "messages"  # of "gram", without passes
Exchange = Callable[[], None]


def exchanges(group: Group, numel: int) -> dict[str, Exchange]:
    """What is timed: an all-reduce and every Adasum, of ``LAYERS`` equal layers."""
    layers = {str(i): torch.empty(max(1, numel // LAYERS)) for i in range(LAYERS)}
    layout = Layout.of(layers, group.size)
    flat = layout.empty("cpu")
    start = torch.randn_like(flat[0]).mul_(1e-3)
    names = ["gram", "gram bf16"]
    # Up to four times the bytes at which "auto" leaves it: only slower from there on.
    if choose("auto", group.size, 1, numel, numel) == "gather":
        names.append("gather")
    if group.size & (group.size - 1) == 0:
        names.append("rvhdd")
    timed: dict[str, Exchange] = {ALL_REDUCE: lambda: all_reduce(flat[0], group).wait()}
    timed |= {name: adasum(name, layout, group, flat) for name in names}
    timed[PASSES] = passes(layout, group, flat)
    timed[MESSAGES] = messages(layout, group, flat[0])

    def reset(exchange: Exchange) -> Exchange:
        def run() -> None:
            flat[0].copy_(start)
            exchange()

        return run

    return {name: reset(exchange) for name, exchange in timed.items()}


def adasum(name: str, layout: Layout, group: Group, flat: list[Tensor]) -> Exchange:
    kind, _, wire = name.partition(" ")
    shared = SliceLayout(layout, Participants(group.size, group))
    algorithm: Any = build_reduction(kind, shared, flat, wire or None)  # type: ignore[arg-type]

    def combine() -> None:
        assert algorithm.compare().is_finite()
        algorithm.combine()

    return combine


def messages(layout: Layout, group: Group, flat: Tensor) -> Exchange:
    """What "gram" sends: shares to all others, a sum of the inner products, and shares back."""
    rank, size = group.rank, group.size
    own, rows = flat.view(size, -1), torch.empty_like(flat).view(size, -1)
    places = [((rank + hop) % size, (rank - hop) % size) for hop in range(1, size)]
    there = MessageRounds([([(to, own[to])], [(by, rows[by])]) for to, by in places], group)
    back = MessageRounds([([(to, own[rank])], [(by, own[by])]) for to, by in places], group)
    products = torch.zeros(len(layout.places), size, size, dtype=torch.float64)
    total = Participants(size, group).prepared(products)

    def swap() -> None:
        for _ in places:
            there.start().wait()
        if total is None:
            all_reduce(products, group).wait()
        else:
            total.add(Handle.wait)
        for _ in places:
            back.start().wait()

    return swap


def passes(layout: Layout, group: Group, flat: list[Tensor]) -> Exchange:
    """What each rank computes under "gram" for its share, without any message."""
    layout_alone = SliceLayout(layout, Participants(group.size, None, place=group.rank))
    runs = layout_alone.runs(layout_alone.share())
    mine = [layout_alone.placed(section, group.rank) for section in layout_alone.share()]
    operands = Operands(layout_alone, mine, runs, flat, split=False)
    outs = [torch.empty_like(rows[0]) for rows in operands.rows]
    for rows in operands.rows:
        rows.normal_(std=1e-3)

    def compute() -> None:
        operands.begin()
        for index in range(len(runs)):
            operands.add(index)
        operands.analyze(None)
        redone = operands.redo(outs)
        for index in range(len(runs)):
            operands.combine(index, outs, redone)

    return compute


def idle_share(exchange: Exchange, seconds: float) -> float:
    """The idle share of the cores' time while ``exchange`` is repeated for half a second."""
    dist.barrier()
    before = psutil.cpu_times()
    for _ in range(max(3, int(0.5 / seconds))):
        exchange()
    after = psutil.cpu_times()
    return (after.idle - before.idle) / (sum(after) - sum(before))


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Time all algorithms, about ``budget`` seconds per size, on every rank."""
    links, cases = Links.connect(offbeat.World.discover()), []
    group = links.open("world")
    assert group is not None, "at least two ranks"
    for kib in case["sizes"]:
        timed = exchanges(group, kib * 256)
        once = in_turns(timed, 1, clock=seconds_together)  # opens connections and buffers
        rounds = min(100, max(3, int(case["budget"] / sum(each for (each,) in once.values()))))
        times = in_turns(timed, rounds, clock=seconds_together)
        idle = idle_share(timed[ALL_REDUCE], median(times[ALL_REDUCE]))
        cases.append({"kib": kib, "seconds": times, "idle": idle})
    links.close()
    return cases
