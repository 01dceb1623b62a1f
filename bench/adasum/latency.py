"""Adasum takes at most 1.45 times as long as an all-reduce.

Over message sizes, relative to Gloo's all-reduce. All algorithms run in turns in the same
processes. Needs root.
"""

from collections.abc import Iterator
from itertools import product
from statistics import median
from typing import Any

from bench.adasum.exchanges import ALL_REDUCE, LAYERS, MESSAGES, PASSES, measure
from bench.harness import GOAL, Bench, Claim, Result, command, numbers
from bench.harness.ranks import on_nodes
from offbeat.methods.adasum.method import choose

KIB, LARGE = (1, 16, 64, 256, 1024, 4096, 16384), (65536, 262144)
UNLIMITED, PAPER = "unlimited", 1.45  # times an all-reduce, at most, up to 256 MiB
GOALS = (  # below or from 1 MiB on; at most so many times an all-reduce
    ("from 1 MiB up, at most", 1.05, "auto", True),
    ("from 1 MiB up with 16-bit messages, at most", 0.6, "gram bf16", True),
    ("below, at most", 1.5, "auto", False),
)
NAMES = ("auto", "gather", "gram", "rvhdd", "gram bf16", MESSAGES, "floor")
HEADINGS = ("where", "KiB", ALL_REDUCE, "cores idle", *NAMES)
BENCH = Bench(name="adasum/latency", minutes=8, full_minutes=25, evidence="Fig. 1")
Cases = list[dict[str, Any]]  # by size


def ratios(setting: str, case: dict[str, Any]) -> dict[str, float]:
    """Medians as multiples of the all-reduce; "auto" is the one that is chosen.

    The floor of "gram" is the time of its messages, or of an all-reduce, and of its passes.
    """
    medians = {name: median(times) for name, times in case["seconds"].items()}
    found = {name: each / medians[ALL_REDUCE] for name, each in medians.items()}
    found["floor"] = max(1, found[MESSAGES]) + found[PASSES]
    nodes, size = int(setting.split()[0]), case["kib"] * 1024
    return found | {"auto": found[choose("auto", nodes, LAYERS, size, size)]}


def span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f} x"


def claims(setting: str, cases: Cases) -> Iterator[Claim]:
    """The paper's bound, and our goals."""
    found = [(case["kib"] >= 1024, ratios(setting, case)) for case in cases]
    every = [ratio["auto"] for _, ratio in found]
    # In the paper's cluster links limit an all-reduce, and not processors that all ranks share.
    needs = "links slower than the processors" if setting.endswith(UNLIMITED) else ""
    text, holds = f"{setting}: at most 1.45 x an all-reduce", max(every) <= PAPER
    yield Claim(text, f"{PAPER} x", span(every), holds, needs=needs)
    for what, goal, name, wanted in GOALS:
        within = [ratio[name] for is_large, ratio in found if is_large == wanted]
        floors = [ratio["floor"] for is_large, ratio in found if is_large]
        floor = f", floor {span(floors)}" if wanted and name == "auto" else ""
        ours, holds = f"{span(within)}{floor}", max(within) <= goal
        yield Claim(f"{setting}, {what}", f"{goal} x", ours, holds, GOAL)


def rows(setting: str, cases: Cases) -> Iterator[tuple[str, ...]]:
    for case in cases:
        found, base = ratios(setting, case), median(case["seconds"][ALL_REDUCE]) * 1e3
        columns = (f"{found[name]:.2f}" if name in found else "-" for name in NAMES)
        yield setting, f"{case['kib']}", f"{base:.2f} ms", f"{case['idle']:.0%}", *columns


@command(
    BENCH, "--rate 250mbit,unlimited --nodes 4", nodes="Ranks, one on each node.",
    rate="Limits of every link.", full="Up to 256 MiB, and more rounds.",
)  # fmt: skip
def app(
    nodes: str = "2,4,8", rate: str = f"1gbit,250mbit,{UNLIMITED}", full: bool = False
) -> Result:
    case = {"sizes": [*KIB, *LARGE] if full else KIB, "budget": 20.0 if full else 4.0}
    found = {}
    for count, limit in product(numbers(nodes), rate.split(",")):
        given = None if limit == UNLIMITED else limit
        found[f"{count} nodes, {limit}"] = on_nodes(measure, case, count, rate=given)
    return Result.by_case("Adasum, x an all-reduce", HEADINGS, found, rows, claims)
