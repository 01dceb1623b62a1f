"""Predictions for a model of the size of GPT-2 on 4 to 4,096 nodes, a picture, and their cost."""

import time

from matplotlib.figure import Figure

import offbeat
from bench.harness import Bench, Claim, Result, command, files
from offbeat.kit.quantity import parse_rate
from offbeat.plan import Fabric, Stragglers, predict, read_profile

RATES = ("1gbit", "10gbit", "100gbit")
NODES = (4, 8, 16, 64, 256, 1024, 4096)
METHODS = (
    "ddp", "adasum", "lags", "sgp(overlap=1,wire='bf16')", "local_sgd(every=8)", "daso(every=8)",
    "diloco(every=100)", "diloco(every=100,fragments=4,delay=5,wire='int8')",
    "sparse_loco(every=30)", "ad_psgd",
)  # fmt: skip
# Steps differ by 3 %, and 1 % of them take three times as long.
STRAGGLERS = Stragglers(jitter=0.03, late_share=0.01, late_factor=3.0)
BENCH = Bench(name="plan/gpt2", minutes=1)


def draw(found: dict[tuple[str, str], list[float]], computing: float) -> None:
    """One panel for each rate: seconds of a step over nodes, both logarithmic."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    panels = dict(zip(RATES, figure.subplots(1, len(RATES), sharey=True), strict=True))
    for (rate, method), seconds in found.items():
        panels[rate].plot(NODES, seconds, label=method, marker="o", markersize=3)
    for rate, axes in panels.items():
        axes.axhline(computing, color="0.6", linestyle=":")
        axes.set(xscale="log", yscale="log", title=rate.replace("gbit", " Gbit/s"), xlabel="nodes")
        axes.set_xticks(NODES, [f"{nodes:,}" for nodes in NODES], fontsize="small", minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.25)
    first = panels[RATES[0]]
    first.set_ylabel("seconds of a step; dotted: computing alone")
    handles = first.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(files.ASSETS / "plan.png", dpi=110)


@command(BENCH, "--steps 50", steps="Steps of a prediction, at least.")
def app(steps: int = 200) -> Result:
    """Predict all methods at three rates, and draw the picture."""
    profile, found = read_profile(files.ASSETS / "gpt2.json"), {}
    largest = dict.fromkeys(RATES, 0.0)
    cases = [(rate, method, nodes) for rate in RATES for method in METHODS for nodes in NODES]
    for rate, method, nodes in cases:
        fabric = Fabric(nodes=nodes, rate=float(parse_rate(rate)), latency=100e-6)
        began = time.perf_counter()
        made = predict(offbeat.algorithm(method), profile, fabric, STRAGGLERS, steps)
        largest[rate] += (time.perf_counter() - began) * (nodes == NODES[-1])
        found.setdefault((rate, method), []).append(made.seconds)
    draw(found, profile.compute)
    slowest = max(largest.values())
    text = f"all methods on 4,096 ranks, {steps} steps"
    claims = [Claim(text, "under 20 s", f"{slowest:.1f} s", slowest < 20)]
    rows = [(*case, *(f"{each:.3g}" for each in seconds)) for case, seconds in found.items()]
    headings = ("rate", "method", *(f"{nodes:,} nodes" for nodes in NODES))
    title = "Predicted seconds of a step, 124 M parameters, 0.25 s alone"
    return Result(title, headings, rows, claims)
