"""Latency of Adasum over message sizes, relative to Gloo's all-reduce (Figure 1 of the paper).

All algorithms run in turns in the same processes. Each run adds its numbers of nodes and rates
to the committed result, or replaces them. Needs root.
"""

import json
import time
from collections.abc import Callable
from itertools import product
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import offbeat
from bench.harness import files
from bench.harness.bench import Bench
from bench.harness.claim import GOAL, Claim
from bench.harness.compact import summary
from bench.harness.ranks import on_nodes
from bench.harness.report import report
from offbeat.comm.collectives import all_reduce
from offbeat.comm.group import Group
from offbeat.comm.links import Links
from offbeat.functional import Layout
from offbeat.parameters.adasum.method import build_reduction, choose
from offbeat.parameters.adasum.operands import Operands
from offbeat.parameters.adasum.participants import Participants
from offbeat.parameters.adasum.slice_layout import SliceLayout

KIB = (1, 16, 64, 256, 1024, 4096, 16384)
UNLIMITED = "unlimited"
LAYERS = 16
PAPER = 1.45  # times an all-reduce, at most, up to 256 MiB
PASSES = "passes"  # over memory; an all-reduce and these, one after the other, are the floor
NAMES = ("auto", "gather", "gram", "rvhdd", "gram bf16", "floor")
BENCH = Bench(
    name="adasum/latency",
    claim="Adasum takes 1.05 x an all-reduce (Fig. 1)",
    minutes=8,
    full_minutes=25,
    evidence={"Fig. 1": "Adasum takes at most 1.45 times as long as an all-reduce"},
)
BySetting = dict[str, list[dict[str, Any]]]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def kinds(size: int) -> list[tuple[str, str | None]]:
    """Algorithms and wire dtypes that work between ``size`` ranks."""
    halving = [("rvhdd", None)] if size & (size - 1) == 0 else []
    return [("gather", None), ("gram", None), *halving, ("gram", "bf16")]


def exchanges(group: Group, numel: int) -> dict[str, Callable[[], None]]:
    """What is timed: an all-reduce and every Adasum, of ``LAYERS`` equal layers."""
    layers = {str(i): torch.empty(max(1, numel // LAYERS)) for i in range(LAYERS)}
    layout = Layout.of(layers, group.size)
    flat = layout.empty("cpu")
    start = torch.randn_like(flat[0]).mul_(1e-3)

    def reduce() -> None:
        all_reduce(flat[0], group).wait()

    timed = {"all-reduce": reduce}
    for method, wire in kinds(group.size):
        # Up to four times the bytes at which "auto" leaves it.
        if method == "gather" and choose("auto", group.size, 1, numel, numel) != "gather":
            continue  # only slower from there on
        algorithm = build_reduction(
            method, SliceLayout(layout, Participants(group.size, group)), flat, wire
        )  # type: ignore[arg-type]

        def combine(algorithm: Any = algorithm) -> None:
            assert algorithm.compare().is_finite()
            algorithm.combine()

        timed[f"{method} {wire}" if wire else method] = combine
    timed[PASSES] = passes(layout, group, flat)

    def reset(exchange: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            flat[0].copy_(start)
            exchange()

        return run

    return {name: reset(exchange) for name, exchange in timed.items()}


def passes(layout: Layout, group: Group, flat: list[Tensor]) -> Callable[[], None]:
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


def seconds(exchange: Callable[[], None]) -> float:
    """The slowest rank's time; all ranks start together."""
    dist.barrier()
    started = time.perf_counter()
    exchange()
    spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Time all algorithms, about ``budget`` seconds per size, on every rank."""
    links = Links.connect(offbeat.World.discover())
    group = links.open("world")
    assert group is not None, "at least two ranks"
    cases = []
    for kib in case["sizes"]:
        timed = exchanges(group, kib * 256)
        once = sum([seconds(exchange) for exchange in timed.values()])  # connections and buffers
        rounds = min(100, max(3, int(case["budget"] / once)))
        times: dict[str, list[float]] = {name: [] for name in timed}
        for i in range(rounds):
            for name in sorted(timed, reverse=i % 2 == 0):
                times[name].append(seconds(timed[name]))
        cases.append({"kib": kib, "seconds": times})
    links.close()
    return cases


def earlier() -> BySetting:
    """The summaries of earlier runs, by numbers of nodes and rate."""
    file = files.result(BENCH.name)
    return json.loads(file.read_text("utf-8"))["measured"] if file.exists() else {}


def ratios(setting: str, case: dict[str, Any]) -> dict[str, float]:
    """Medians as multiples of the all-reduce; "auto" is the one that is chosen."""
    medians = {name: times["median"] for name, times in case["seconds"].items()}
    found = {name: median / medians["all-reduce"] for name, median in medians.items()}
    found["floor"] = 1 + found[PASSES]
    nodes = int(setting.split()[0])
    return found | {"auto": found[choose("auto", nodes, 1, case["kib"] * 1024, case["kib"] * 1024)]}


def claims(setting: str, cases: list[dict[str, Any]]) -> list[Claim]:
    """The paper's bound for all sizes, and our goals by size, for so many nodes at this rate."""
    found = [(case["kib"], ratios(setting, case)) for case in cases]
    every = [ratio["auto"] for _, ratio in found]
    floors = [ratio["floor"] for kib, ratio in found if kib >= 1024]
    # Without a limit links are as fast as memory, and passes over it cost as much as messages; in
    # the paper's cluster it is some 70 times as fast (900 GB/s of a V100, 100 Gbit/s).
    needs = "links slower than memory" if setting.endswith(UNLIMITED) else ""
    largest = f"{max(kib for kib, _ in found) // 1024} MiB"
    made = [Claim(f"{setting}: at most 1.45 x an all-reduce, up to {largest}",
                  f"{PAPER} x", f"{min(every):.2f} to {max(every):.2f} x",
                  max(every) <= PAPER, needs=needs)]  # fmt: skip
    for what, goal, name, is_large in (
        ("from 1 MiB up, at most", 1.05, "auto", True),
        ("from 1 MiB up with 16-bit messages, at most", 0.6, "gram bf16", True),
        ("below, at most", 1.5, "auto", False),
    ):
        within = [ratio[name] for kib, ratio in found if (kib >= 1024) == is_large]
        ours = f"{min(within):.2f} to {max(within):.2f} x"
        if is_large and name == "auto":
            ours += f", floor {min(floors):.2f} to {max(floors):.2f} x"
        made.append(Claim(f"{setting}, {what}", f"{goal} x", ours, max(within) <= goal, GOAL))
    return made


def row(setting: str, case: dict[str, Any]) -> tuple[str, ...]:
    """What the table shows of one size."""
    found, base = ratios(setting, case), case["seconds"]["all-reduce"]["median"] * 1e3
    columns = [f"{found[name]:.2f}" if name in found else "-" for name in NAMES]
    return (setting, f"{case['kib']}", f"{base:.2f} ms", *columns)


@app.command(epilog=BENCH.examples("--rate 250mbit,unlimited --nodes 4"))
def main(
    nodes: Annotated[str, typer.Option(help="Ranks, one on each node.")] = "2,4,8",
    rate: Annotated[str, typer.Option(help="Limits of every link.")] = f"250mbit,1gbit,{UNLIMITED}",
    full: Annotated[bool, typer.Option("--full", help="Up to 256 MiB, and more rounds.")] = False,
) -> None:
    """Time Adasum beside an all-reduce."""
    sizes = [*KIB, 65536, 262144] if full else list(KIB)
    case = {"sizes": sizes, "budget": 20.0 if full else 4.0}
    settings, raw = earlier(), {}
    for limit, count in product(rate.split(","), nodes.split(",")):
        real = None if limit == UNLIMITED else limit
        setting = f"{count} nodes, {limit}"
        raw[setting] = on_nodes(measure, case, int(count), rate=real)
        settings[setting] = [
            {"kib": each["kib"], "seconds": {n: summary(s) for n, s in each["seconds"].items()}}
            for each in raw[setting]
        ]
    rows = [row(setting, case) for setting in sorted(settings) for case in settings[setting]]
    judged = [claim for setting in sorted(settings) for claim in claims(setting, settings[setting])]
    headings = ("where", "KiB", "all-reduce", *NAMES)
    report(BENCH, "Adasum, x an all-reduce", headings, rows, judged, measured=settings, raw=raw)


if __name__ == "__main__":
    app()
