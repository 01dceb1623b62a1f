"""Figure 1 of the Adasum paper: its latency over message sizes, beside Gloo's all-reduce.

All algorithms run in turns in the same processes, so that whatever else the machine does hits all
alike. CPU and Gloo, one thread a worker, on emulated nodes (root and iproute2). Every run adds its
numbers of nodes and its rates to the results, or renews them.
"""

import json
import statistics
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _claims import RESULTS, Claim, report
from _ranks import on_nodes, run_rank

import offbeat
from offbeat.adasum_wire import Cut, Peers, choose
from offbeat.adasum_wire.choose import is_small
from offbeat.collectives import all_reduce
from offbeat.functional import Layout
from offbeat.groups import Group, Links

KIB = (1, 16, 64, 256, 1024, 4096, 16384)
UNLIMITED = "unlimited"
LAYERS = 16
NAMES = ("auto", "gather", "gram", "rvhdd", "gram bf16")
EPILOG = "Examples: `python bench/adasum_latency.py --rate 250mbit,unlimited --nodes 4`"
Places = dict[str, list[dict[str, Any]]]
app = typer.Typer(pretty_exceptions_enable=False)


def kinds(size: int) -> list[tuple[str, str | None]]:
    """Algorithms and wires that work between ``size`` ranks."""
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
        if method == "gather" and not is_small(numel, group.size):
            continue  # only slower from there on
        algorithm = choose(method, Cut(layout, Peers(group.size, group)), flat, wire)  # type: ignore[arg-type]

        def combine(algorithm: Any = algorithm) -> None:
            assert algorithm.compare().is_finite()
            algorithm.combine()

        timed[f"{method} {wire}" if wire else method] = combine

    def reset(exchange: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            flat[0].copy_(start)
            exchange()

        return run

    return {name: reset(exchange) for name, exchange in timed.items()}


def seconds(exchange: Callable[[], None]) -> float:
    """The slowest rank's time; all ranks start together."""
    dist.barrier()
    started = time.perf_counter()
    exchange()
    spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Time everything, about ``budget`` seconds a size; the same number of rounds on all ranks."""
    links = Links.connect(offbeat.Groups.discover())
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


def ratios(place: str, case: dict[str, Any]) -> dict[str, float]:
    """Medians as multiples of the all-reduce; "auto" is the one that is chosen."""
    medians = {name: statistics.median(times) for name, times in case["seconds"].items()}
    found = {name: median / medians["all-reduce"] for name, median in medians.items()}
    nodes = int(place.split()[0])
    return found | {"auto": found["gather" if is_small(case["kib"] * 1024, nodes) else "gram"]}


def claims(place: str, cases: list[dict[str, Any]]) -> list[Claim]:
    """One for each range of sizes, between so many nodes at this rate."""
    found = [(case["kib"], ratios(place, case)) for case in cases]
    made = []
    for what, goal, name, is_large in (
        ("from 1 MiB up, at most", 1.05, "auto", True),
        ("from 1 MiB up with 16-bit messages, at most", 0.6, "gram bf16", True),
        ("below, at most", 1.5, "auto", False),
    ):
        paper = f"{goal} x" if name != "auto" else f"{goal} x; paper 1.45 x"
        within = [ratio[name] for kib, ratio in found if (kib >= 1024) == is_large]
        ours = f"{min(within):.2f} to {max(within):.2f} x"
        made.append(Claim(f"{place}, {what}", paper, ours, max(within) <= goal))
    return made


def row(place: str, case: dict[str, Any]) -> tuple[str, ...]:
    """What the table shows of one size."""
    found, base = ratios(place, case), statistics.median(case["seconds"]["all-reduce"]) * 1e3
    columns = [f"{found[name]:.2f}" if name in found else "-" for name in NAMES]
    return (place, f"{case['kib']}", f"{base:.2f} ms", *columns)


@app.command(epilog=EPILOG)
def main(
    nodes: Annotated[str, typer.Option(help="Ranks, one on each node.")] = "2,4,8",
    rate: Annotated[str, typer.Option(help="Limits of every link.")] = f"250mbit,1gbit,{UNLIMITED}",
    full: Annotated[
        bool, typer.Option("--full", help="Up to 256 MiB, and many more rounds.")
    ] = False,
    rank: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time Adasum beside an all-reduce."""
    if rank is not None:
        run_rank(rank, measure)
        return
    sizes = [*KIB, 65536, 262144] if full else list(KIB)
    case = {"sizes": sizes, "budget": 20.0 if full else 1.0}
    file = RESULTS / "adasum_latency.json"
    places: Places = json.loads(file.read_text("utf-8"))["places"] if file.exists() else {}
    for limit, count in product(rate.split(","), nodes.split(",")):
        real = None if limit == UNLIMITED else limit
        places[f"{count} nodes, {limit}"] = on_nodes(__file__, case, int(count), rate=real)
    rows = [row(place, case) for place in sorted(places) for case in places[place]]
    judged = [claim for place in sorted(places) for claim in claims(place, places[place])]
    headings = ("where", "KiB", "all-reduce", *NAMES)
    report("adasum_latency", "Adasum, x an all-reduce", headings, rows, judged, places=places)


if __name__ == "__main__":
    app()
