"""Calls of the store, false verdicts and time to the verdict by number of ranks.

All ranks wait in a call, on one real TCPStore; then three neighbours are killed or frozen at once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.scale.swarm import VICTIMS, Swarm, cores

SETTLE = 10.0  # seconds after the start, which are not measured
LIMIT = 180.0  # seconds until all must have the verdict
HEADINGS = (
    "ranks", "cores", "victims", "seconds", "beats / s", "calls / s", "keys / call", "store CPU",
    "false verdicts", "first verdict", "last verdict",
)  # fmt: skip
BENCH = Bench(
    name="scale/heartbeat",
    claim="Failure detection costs the same per rank in every world",
    minutes=10,
    full_minutes=72,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Result:
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


def measure(ranks: int, is_loaded: bool, is_frozen: bool, seconds: float) -> Result:
    """Let ranks wait for some time, then kill or freeze three of them."""
    swarm = Swarm(ranks, cores() if is_loaded else 0)
    try:
        time.sleep(SETTLE)
        begin, (before, cpu_before) = time.monotonic(), swarm.calls()
        time.sleep(seconds)
        (after, cpu), elapsed = swarm.calls(), time.monotonic() - begin
        false = len(swarm.verdicts())
        since = swarm.freeze() if is_frozen else swarm.kill()
        living = ranks - len(VICTIMS)
        while len(found := swarm.verdicts()) < living and time.monotonic() - since < LIMIT:
            time.sleep(0.5)
    finally:
        swarm.end()
    made = after - before
    calls = sum(made.values()) - made["keys"]
    return Result(
        ranks, is_loaded, is_frozen, elapsed,
        made["set"] / living / elapsed, calls / living / elapsed,
        made["keys"] / max(1, made["multi_get"]), (cpu - cpu_before) / elapsed, false,
        sorted({text for _, text in found}), living - len(found), [at - since for at, _ in found],
    )  # fmt: skip


def row(each: Result) -> tuple[str, ...]:
    return (
        f"{each.ranks:,}",
        "loaded" if each.is_loaded else "free",
        "frozen" if each.is_frozen else "killed",
        f"{each.seconds:.0f}",
        f"{each.beats:.2f}",
        f"{each.calls:.2f}",
        f"{each.keys:.1f}",
        f"{each.store_cpu:.1%}",
        f"{each.false_verdicts}",
        *(f"{end(each.verdicts, default=np.inf):.1f} s" for end in (min, max)),
    )


def claims(results: Sequence[Result]) -> list[Claim]:
    most = max(each.calls for each in results)
    false = sum(each.false_verdicts for each in results)
    last = max(max(each.verdicts, default=np.inf) for each in results)
    is_one = all(len(each.texts) == 1 and each.missing == 0 for each in results)
    longest = max(results, key=lambda each: each.seconds * each.ranks)
    waited = f"none, {longest.ranks:,} ranks in {longest.seconds:.0f} s among them"
    return [
        Claim("calls of the store per rank and second", "at most 2.1", f"{most:.2f}", most <= 2.1),
        Claim("false verdicts", waited, f"{false}", false == 0),
        Claim("last verdict after the deaths", "at most 30 s", f"{last:.1f} s", last <= 30),
        Claim("all have the same verdict", "always", "yes" if is_one else "no", is_one),
    ]


@app.command(epilog=BENCH.examples("--full", "--ranks 1024 --loaded --seconds 600"))
def main(
    ranks: Annotated[list[int] | None, typer.Option("--ranks", help="Numbers of ranks.")] = None,
    loaded: Annotated[bool, typer.Option("--loaded", help="With --ranks: all cores busy.")] = False,
    frozen: Annotated[bool, typer.Option("--frozen", help="Stop, not kill.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="Of waiting.")] = 60.0,
    full: Annotated[bool, typer.Option("--full", help="Ten minutes, 4,096 ranks too.")] = False,
) -> None:
    """Measure swarms of 64 to 1,024 ranks, the largest also with all cores busy, and frozen."""
    sizes = ranks or [64, 256, 1024, *([4096] if full else [])]
    cases = [(size, loaded, frozen) for size in sizes]
    if ranks is None:
        cases = [
            *((size, False, False) for size in sizes),
            (1024, True, False),
            (1024, False, True),
        ]
    results = []
    for size, is_loaded, is_frozen in cases:
        console.print(f"{size} ranks, cores {'loaded' if is_loaded else 'free'}")
        results.append(measure(size, is_loaded, is_frozen, 600.0 if full else seconds))
        console.print("  ".join(row(results[-1])))
    title = "Heartbeats on one TCPStore, rates per rank and second"
    report(BENCH, title, HEADINGS, [*map(row, results)], claims(results), measured=results)


if __name__ == "__main__":
    app()
