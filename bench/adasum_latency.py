"""Figure 1 of the Adasum paper: its latency over message sizes, beside Gloo's all-reduce.

All algorithms run in turns in the same processes, so that whatever else the machine does hits all
alike. CPU and Gloo, one thread a worker; with --rate on emulated nodes (root and iproute2).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import offbeat
from offbeat.adasum_wire import Cut, Peers, choose
from offbeat.collectives import all_reduce
from offbeat.functional import Layout
from offbeat.groups import Group, Links

RESULTS = Path(__file__).parent / "results" / "adasum_latency.json"
PAPER = "Fig. 1: at most 1.45 x all-reduce, 64 GPUs, 100 Gbit/s, up to 256 MB"
KIB = (1, 16, 64, 256, 1024, 4096, 16384)
LAYERS = 16
EPILOG = "Examples: `python bench/adasum_latency.py --rate 250mbit --nodes 4`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


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


def work(budget: float, sizes: list[int]) -> list[dict[str, Any]]:
    """Time everything, about ``budget`` seconds a size; the same number of rounds on all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    links = Links.connect(offbeat.Groups.discover())
    group = links.open("world")
    assert group is not None, "at least two ranks"
    cases = []
    for kib in sizes:
        timed = exchanges(group, kib * 256)
        for _ in range(2):  # connections and buffers
            once = sum([seconds(exchange) for exchange in timed.values()])
        rounds = min(100, max(3, int(budget / once)))
        times: dict[str, list[float]] = {name: [] for name in timed}
        for i in range(rounds):
            for name in sorted(timed, reverse=i % 2 == 0):
                times[name].append(seconds(timed[name]))
        cases.append({"kib": kib, "ranks": group.size, "seconds": times})
    links.close()
    dist.destroy_process_group()
    return cases


def table(cases: list[dict[str, Any]], title: str) -> Table:
    """Medians, as multiples of the all-reduce."""
    names = list(dict.fromkeys(name for case in cases for name in case["seconds"]))
    shown = Table(title=title, caption=PAPER)
    shown.add_column("KiB", justify="right")
    for name in names:
        shown.add_column(name, justify="right")
    for case in cases:
        medians = {name: float(np.median(times)) for name, times in case["seconds"].items()}
        base = medians.pop("all-reduce")
        ratios = [f"{medians[n] / base:.2f}" if n in medians else "-" for n in names[1:]]
        shown.add_row(str(case["kib"]), f"{base * 1e3:.2f} ms", *ratios)
    return shown


@app.command(epilog=EPILOG)
def main(
    nodes: Annotated[int, typer.Option(help="Ranks, one on each node.")] = 4,
    rate: Annotated[str | None, typer.Option(help="Limit of every node's link.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Up to 256 MiB, five times longer.")] = False,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time Adasum beside an all-reduce."""
    sizes = [*KIB, 65536, 262144] if full else list(KIB)
    if worker is not None:
        cases = work(20.0 if full else 4.0, sizes)
        if os.environ["RANK"] == "0":
            Path(worker).write_text(json.dumps(cases), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as folder:
        found = str(Path(folder, "cases.json"))
        script = [sys.executable, __file__, "--worker", found, *(["--full"] if full else [])]
        if rate is None:
            launch = ["torch.distributed.run", "--nproc-per-node", str(nodes), *script[1:]]
        else:
            launch = ["offbeat", "lab", "--nodes", str(nodes), "--rate", rate, "--", *script]
        subprocess.run([sys.executable, "-m", *launch], check=True)
        cases = json.loads(Path(found).read_text(encoding="utf-8"))
    where = f"{nodes} nodes, {rate or 'unlimited'}"
    console.print(table(cases, f"Adasum beside Gloo's all-reduce, {where}"))
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    kept[where] = about | {"cpu_count": os.cpu_count(), "cases": cases}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    console.print(f"every round's times: {os.path.relpath(RESULTS)}")


if __name__ == "__main__":
    app()
