"""Time and memory of the optimizer when the ranks of a node share it (Table 1 of the paper).

Two nodes with four ranks each, LAMB on a transformer as for BERT in the paper, given gradients. The
update is timed with and without a partition in turns.
"""

from statistics import median
from typing import Any

import numpy as np

from bench.adasum.update import BATCHES, measure, peaks
from bench.harness import GOAL, Bench, Claim, Effect, Result, command
from bench.harness.ranks import on_nodes

NODES, RANKS, MICRO_BATCH = 2, 4, 8
PLAIN, SPLIT = METHODS = ("adasum(within='local')", "adasum(partition=True)")
MIDDLE = BATCHES.index(MICRO_BATCH)
HEADINGS = ("algorithm", "moments a worker", "optimizer", "whole update",
            f"at most, micro-batch {MICRO_BATCH}", "micro-batch in this memory")  # fmt: skip
BENCH = Bench(
    name="adasum/partition",
    claim="Ranks of a node share the optimizer (Table 1)",
    minutes=2,
    full_minutes=3,
    evidence={"Table 1": "Sharing the optimizer in a node halves the time of an update"},
)


def fitting(most: list[float], room: float) -> float:
    """The micro-batch that takes ``room`` bytes, by a line through what was measured."""
    slope, start = np.polyfit(BATCHES, most, 1)
    return float((room - start) / slope)


def figures(found: dict[str, Any], method: str) -> dict[str, float]:
    """Bytes of the moments and at most, seconds, and the micro-batch that fits."""
    room = found["peaks"][PLAIN][MIDDLE]
    seconds = {kind: median(times) for kind, times in found["seconds"][method].items()}
    most = found["peaks"][method]
    return {"moments": found["bytes"][method], **seconds, "peak": most[MIDDLE],
            "fits": fitting(most, room)}  # fmt: skip


def row(method: str, of: dict[str, float]) -> tuple[str, ...]:
    times = f"{of['optimizer']:.3f} s", f"{of['update']:.3f} s"
    moments, peak = f"{of['moments'] / 2**20:.1f} MiB", f"{of['peak'] / 2**20:.0f} MiB"
    return method, moments, *times, peak, f"{of['fits']:.1f}"


def claims(plain: dict[str, float], split: dict[str, float], apart: float) -> list[Claim]:
    times = {kind: plain[kind] / split[kind] for kind in plain}
    return [
        Claim.effect("an update takes less time", Effect(1.82 / 0.97, "x"),
                     Effect(times["update"], "x")),
        Claim("the optimizer takes less time", "", f"{times['optimizer']:.2f} x less",
              times["optimizer"] > 1.0, GOAL),
        Claim("a worker's moments take a quarter of the memory", "4 x less",
              f"{times['moments']:.2f} x less", times["moments"] >= 3.8, GOAL),
        Claim.effect("a larger micro-batch takes the same memory", Effect(36 / 22, "x"),
                     Effect(1 / times["fits"], "x")),
        Claim("the models are the same", "", f"apart by {apart:.1e}", apart < 1e-4, GOAL),
    ]  # fmt: skip


@command(
    BENCH, "--full", full="A model four times as large.", rate="Of a node's link; none: no limit."
)
def app(full: bool = False, rate: str | None = None) -> Result:
    """Time the update of a transformer with LAMB and Adasum, with and without a partition."""
    case = {"algorithms": METHODS, "width": 512 if full else 256, "steps": 20}
    found = on_nodes(measure, case, NODES, RANKS, rate)
    found["peaks"] = on_nodes(peaks, case, NODES, RANKS, rate)
    of = {method: figures(found, method) for method in METHODS}
    title = f"{NODES} nodes, {RANKS} ranks each, {found['parameters'] / 1e6:.1f} M parameters"
    rows = [row(*each) for each in of.items()]
    judged = claims(of[PLAIN], of[SPLIT], found["apart"])
    where = rate or "links not limited"
    return Result(f"{title}, {where}", HEADINGS, rows, judged, measured=found)
