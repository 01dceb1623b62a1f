"""Failure detection costs the same per rank in every world.

Calls of the store, false verdicts and time to the verdict by number of ranks. All ranks wait in a
call, on one real TCPStore; then three neighbours are killed or frozen at once.
"""

import os
import time
from math import inf
from typing import Any

from bench.harness import Bench, Claim, Result, command
from bench.harness.growth import sweep
from bench.scale.swarm import VICTIMS, Swarm

SETTLE = 10.0  # seconds after the start, which are not measured
LIMIT = 180.0  # seconds until all must have the verdict
HEADINGS = (
    "ranks", "cores", "victims", "seconds", "beats / s", "calls / s", "keys / call", "store CPU",
    "false verdicts", "first verdict", "last verdict",
)  # fmt: skip
BENCH = Bench(name="scale/heartbeat", minutes=10, full_minutes=72)


def measure(ranks: int, is_loaded: bool, is_frozen: bool, seconds: float) -> dict[str, Any]:
    """Let ranks wait for some time, then kill or freeze three of them."""
    living = ranks - len(VICTIMS)
    swarm = Swarm(ranks, len(os.sched_getaffinity(0)) if is_loaded else 0)
    try:
        time.sleep(SETTLE)
        begin, before = time.monotonic(), swarm.look()
        time.sleep(seconds)
        after, elapsed = swarm.look(), time.monotonic() - begin
        since = swarm.fail(is_frozen)
        while len(found := swarm.look().verdicts) < living and time.monotonic() - since < LIMIT:
            time.sleep(0.5)
    finally:
        swarm.end()
    made, a_rank = after.calls - before.calls, living * elapsed
    calls = sum(made.values()) - made["keys"]
    return {  # rates are per rank and second, without the victims
        "ranks": ranks,
        "is_loaded": is_loaded,
        "is_frozen": is_frozen,  # the victims, instead of killed
        "seconds": elapsed,
        "beats": made["set"] / a_rank,
        "calls": calls / a_rank,
        "keys": made["keys"] / max(1, made["multi_get"]),  # per call that reads
        "store_cpu": (after.cpu - before.cpu) / elapsed,  # share of a core
        "false_verdicts": len(after.verdicts),
        "texts": sorted({text for _, text in found}),
        "missing": living - len(found),  # ranks without a verdict at the end
        "verdicts": [at - since for at, _ in found],  # seconds from the death
    }


def row(of: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{of['ranks']:,}", "loaded" if of["is_loaded"] else "free",
        "frozen" if of["is_frozen"] else "killed", f"{of['seconds']:.0f}", f"{of['beats']:.2f}",
        f"{of['calls']:.2f}", f"{of['keys']:.1f}", f"{of['store_cpu']:.1%}",
        f"{of['false_verdicts']}",
        *(f"{end(of['verdicts'], default=inf):.1f} s" for end in (min, max)),
    )  # fmt: skip


@command(
    BENCH, "--full", "--ranks 1024 --loaded --seconds 600",
    ranks="Numbers of ranks.", loaded="With --ranks: all cores busy.", frozen="Stop, not kill.",
    seconds="Of waiting.", full="Ten minutes, 4,096 ranks too.",
)  # fmt: skip
def app(
    ranks: list[int] | None = None, loaded: bool = False, frozen: bool = False,
    seconds: float = 60.0, full: bool = False,
) -> Result:  # fmt: skip
    wait = 600.0 if full else seconds
    cases = [(size, loaded, frozen, wait) for size in ranks or ()] or [
        *((size, False, False, wait) for size in (64, 256, 1024, *([4096] if full else []))),
        (1024, True, False, wait),
        (1024, False, True, wait),
    ]
    swarms = sweep(cases, measure, row)
    most = max(each["calls"] for each in swarms)
    false = sum(each["false_verdicts"] for each in swarms)
    last = max(max(each["verdicts"], default=inf) for each in swarms)
    is_one = all(len(each["texts"]) == 1 and each["missing"] == 0 for each in swarms)
    longest = max(swarms, key=lambda each: each["seconds"] * each["ranks"])
    waited = f"none, {longest['ranks']:,} ranks in {longest['seconds']:.0f} s among them"
    claims = [
        Claim("calls of the store per rank and second", "at most 5.1", f"{most:.2f}", most <= 5.1),
        Claim("false verdicts", waited, f"{false}", false == 0),
        Claim("last verdict after the deaths", "at most 30 s", f"{last:.1f} s", last <= 30),
        Claim("all have the same verdict", "always", "yes" if is_one else "no", is_one),
    ]
    title = "Heartbeats on one TCPStore, rates per rank and second"
    return Result(title, HEADINGS, [*map(row, swarms)], claims, swarms)
