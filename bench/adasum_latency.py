"""Figure 1 of the Adasum paper: its latency over message sizes, beside Gloo's all-reduce.

All algorithms run in turns in the same processes, so that whatever else the machine does hits all
alike. CPU and Gloo, one thread a worker; with --rate on emulated nodes (root and iproute2). Every
run adds its number of nodes and its rate to the results, or renews them.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _claims import RESULTS, Claim, report
from _ranks import on_nodes, run_rank

import offbeat
from offbeat.adasum_wire import Cut, Peers, choose
from offbeat.adasum_wire.choose import SMALL
from offbeat.collectives import all_reduce
from offbeat.functional import Layout
from offbeat.groups import Group, Links

KIB = (1, 16, 64, 256, 1024, 4096, 16384)
LAYERS = 16
NAMES = ("auto", "gather", "gram", "rvhdd", "gram bf16")
EPILOG = "Examples: `python bench/adasum_latency.py --rate 250mbit --nodes 4`"
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
        if method == "gather" and numel * 4 * group.size > 2**25:
            continue
        algorithm = choose(method, Cut(layout, Peers(group.size, group)), flat, wire)  # type: ignore[arg-type]

        def combine(algorithm: Any = algorithm) -> None:
            assert algorithm.compare(flat).is_finite()
            algorithm.combine(flat)

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
        for _ in range(2):  # connections and buffers
            once = sum([seconds(exchange) for exchange in timed.values()])
        rounds = min(100, max(3, int(case["budget"] / once)))
        times: dict[str, list[float]] = {name: [] for name in timed}
        for i in range(rounds):
            for name in sorted(timed, reverse=i % 2 == 0):
                times[name].append(seconds(timed[name]))
        cases.append({"kib": kib, "ranks": group.size, "seconds": times})
    links.close()
    return cases


def ratios(case: dict[str, Any]) -> dict[str, float]:
    """Medians as multiples of the all-reduce; "auto" is the one that is chosen."""
    medians = {name: statistics.median(times) for name, times in case["seconds"].items()}
    found = {name: median / medians["all-reduce"] for name, median in medians.items()}
    is_small = case["kib"] * 1024 * case["ranks"] <= SMALL
    return found | {"auto": found["gather" if is_small else "gram"]}


def claims(where: str, cases: list[dict[str, Any]]) -> list[Claim]:
    large = [ratios(case) for case in cases if case["kib"] >= 1024]
    small = [ratios(case)["auto"] for case in cases if case["kib"] < 1024]
    made = []
    for what, goal, found in (
        ("from 1 MiB up, at most", 1.05, [case["auto"] for case in large]),
        ("from 1 MiB up with 16-bit messages, at most", 0.6, [case["gram bf16"] for case in large]),
        ("below, at most", 1.5, small),
    ):
        paper = f"{goal} x" if "16-bit" in what else f"{goal} x; paper 1.45 x"
        ours = f"{min(found):.2f} x to {max(found):.2f} x"
        made.append(Claim(f"{where}: {what}", paper, ours, max(found) <= goal))
    return made


@app.command(epilog=EPILOG)
def main(
    nodes: Annotated[int, typer.Option(help="Ranks, one on each node.")] = 4,
    rate: Annotated[str | None, typer.Option(help="Limit of every node's link.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Up to 256 MiB, five times longer.")] = False,
    rank: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time Adasum beside an all-reduce."""
    if rank is not None:
        run_rank(rank, measure)
        return
    sizes = [*KIB, 65536, 262144] if full else list(KIB)
    case = {"sizes": sizes, "budget": 20.0 if full else 4.0}
    file = RESULTS / "adasum_latency.json"
    places = json.loads(file.read_text("utf-8"))["places"] if file.exists() else {}
    where = f"{nodes} nodes, {rate or 'unlimited'}"
    places[where] = on_nodes(__file__, case, nodes, rate=rate)
    rows, judged = [], []
    for place in sorted(places):
        judged += claims(place, places[place])
        for each in places[place]:
            found = ratios(each)
            columns = [f"{found[n]:.2f}" if n in found else "-" for n in NAMES]
            base = statistics.median(each["seconds"]["all-reduce"]) * 1e3
            rows.append((place, f"{each['kib']}", f"{base:.2f} ms", *columns))
    headings = ("where", "KiB", "all-reduce", *NAMES)
    report("adasum_latency", "Adasum, x an all-reduce", headings, rows, judged, places=places)


if __name__ == "__main__":
    app()
