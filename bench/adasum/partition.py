"""Sharing the optimizer in a node halves the time of an update.

Two nodes with four ranks each, LAMB on a transformer as for BERT in the paper, given gradients. The
update is timed with and without a partition in turns; of memory it is the peak.
"""

from statistics import median
from typing import Any

import numpy as np

from bench.adasum.update import BATCHES, measure, peaks
from bench.harness import GOAL, Bench, Claim, Effect, Result, command
from bench.harness.ranks import on_nodes

NODES, RANKS, MICRO_BATCH = 2, 4, 8
PLAIN, SPLIT = METHODS = ("adasum(within='local')", "adasum(partition=True)")
HEADINGS = ("algorithm", "moments a worker", "optimizer", "whole update",
            f"at most, micro-batch {MICRO_BATCH}", "micro-batch in this memory")  # fmt: skip
BENCH = Bench(name="adasum/partition", minutes=2, full_minutes=3, evidence="Table 1")


def figures(found: dict[str, Any], method: str) -> dict[str, float]:
    """Bytes of the moments and at most, seconds, and the micro-batch that fits plain Adasum's."""
    middle = BATCHES.index(MICRO_BATCH)
    most, room = found["peaks"][method], found["peaks"][PLAIN][middle]
    slope, start = np.polyfit(BATCHES, most, 1)
    seconds = {kind: median(times) for kind, times in found["seconds"][method].items()}
    fits = float((room - start) / slope)
    return {"moments": found["bytes"][method], **seconds, "peak": most[middle], "fits": fits}


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
    BENCH, "--full", full={"width": 512}, width="Of the transformer.",
    rate="Of a node's link; none: no limit.",
)  # fmt: skip
def app(width: int = 256, rate: str | None = None) -> Result:
    case = {"algorithms": METHODS, "width": width, "steps": 20}
    found = on_nodes(measure, case, NODES, RANKS, rate)
    found["peaks"] = on_nodes(peaks, case, NODES, RANKS, rate)
    of = {method: figures(found, method) for method in METHODS}
    rows = [
        (method, f"{each['moments'] / 2**20:.1f} MiB", f"{each['optimizer']:.3f} s",
         f"{each['update']:.3f} s", f"{each['peak'] / 2**20:.0f} MiB", f"{each['fits']:.1f}")
        for method, each in of.items()
    ]  # fmt: skip
    parameters, where = found["parameters"] / 1e6, rate or "links not limited"
    title = f"{NODES} nodes, {RANKS} ranks each, {parameters:.1f} M parameters, {where}"
    judged = claims(of[PLAIN], of[SPLIT], found["apart"])
    return Result(title, HEADINGS, rows, judged, measured=found)
