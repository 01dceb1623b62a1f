"""Failure detection costs the same per rank in every world.

Calls of the store, false verdicts and time to the verdict by number of ranks. All ranks wait in a
call, on one real TCPStore; then three neighbours are killed or frozen at once.
"""

import os
import time
from dataclasses import dataclass
from math import inf

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


@dataclass(frozen=True)
class Beats:
    """Of one swarm; rates are per rank and second, without the victims."""

    ranks: int
    is_loaded: bool
    is_frozen: bool  # the victims, instead of killed
    seconds: float
    beats: float
    calls: float
    keys: float  # per call that reads
    store_cpu: float  # share of a core
    false_verdicts: int
    texts: list[str]
    missing: int  # ranks without a verdict at the end
    verdicts: list[float]  # seconds from the death

    @property
    def row(self) -> tuple[str, ...]:
        return (
            f"{self.ranks:,}", "loaded" if self.is_loaded else "free",
            "frozen" if self.is_frozen else "killed", f"{self.seconds:.0f}", f"{self.beats:.2f}",
            f"{self.calls:.2f}", f"{self.keys:.1f}", f"{self.store_cpu:.1%}",
            f"{self.false_verdicts}",
            *(f"{end(self.verdicts, default=inf):.1f} s" for end in (min, max)),
        )  # fmt: skip


def measure(ranks: int, is_loaded: bool, is_frozen: bool, seconds: float) -> Beats:
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
    return Beats(
        ranks, is_loaded, is_frozen, elapsed, made["set"] / a_rank, calls / a_rank,
        made["keys"] / max(1, made["multi_get"]), (after.cpu - before.cpu) / elapsed,
        len(after.verdicts), sorted({text for _, text in found}), living - len(found),
        [at - since for at, _ in found],
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
    swarms = sweep(cases, measure, lambda swarm: swarm.row)
    most, false = max(each.calls for each in swarms), sum(each.false_verdicts for each in swarms)
    last = max(max(each.verdicts, default=inf) for each in swarms)
    is_one = all(len(each.texts) == 1 and each.missing == 0 for each in swarms)
    longest = max(swarms, key=lambda each: each.seconds * each.ranks)
    waited = f"none, {longest.ranks:,} ranks in {longest.seconds:.0f} s among them"
    claims = [
        Claim("calls of the store per rank and second", "at most 5.1", f"{most:.2f}", most <= 5.1),
        Claim("false verdicts", waited, f"{false}", false == 0),
        Claim("last verdict after the deaths", "at most 30 s", f"{last:.1f} s", last <= 30),
        Claim("all have the same verdict", "always", "yes" if is_one else "no", is_one),
    ]
    title = "Heartbeats on one TCPStore, rates per rank and second"
    return Result(title, HEADINGS, [each.row for each in swarms], claims, swarms)
