"""The share of computing on three sites, 100 ms apart, from 10 Mbit/s to 1 Gbit/s: a picture."""

import json

import numpy as np
from matplotlib.figure import Figure

import offbeat
from bench.harness import Bench, Result, at_least, command, files
from bench.harness.gpt import gpt
from bench.internet.sites import SIZES
from offbeat.plan import Fabric, Parameter, Profile, Speeds, predict, read_profile

BENCH = Bench(name="internet/bandwidth", minutes=1)
RATES = np.geomspace(10e6, 1e9, 13)
STEP = 0.93  # seconds, which internet/sites has measured for a rank alone
SMALL = {
    "ddp": "ddp",
    "sgp(overlap=4)": "sgp(overlap=4,within='local')",
    "diloco": "diloco(every=10,within='local')",
    "streaming diloco": "diloco(every=10,fragments=2,delay=3,wire='int8',within='local')",
    "sparse_loco": "sparse_loco(every=10,within='local')",
}
LARGE = {
    "ddp": "ddp",
    "sgp(overlap=4)": "sgp(overlap=4,wire='bf16',within='local')",
    "diloco": "diloco(every=100,within='local')",
    "streaming diloco": "diloco(every=100,fragments=4,delay=20,wire='int8',within='local')",
    "sparse_loco": "sparse_loco(every=100,within='local')",
}


def small() -> Profile:
    """The model of internet/sites."""
    model = gpt(**SIZES).model
    layers = [Parameter(name, p.numel()) for name, p in model.named_parameters()]
    return Profile.by_size(layers, STEP / 3, 2 * STEP / 3, 0.0, Speeds.of_bandwidth(1e10))


def shares(methods: dict[str, str], profile: Profile, inside: float) -> dict[str, list[float]]:
    """The share of computing of each method at every rate; ``inside`` a site, bit/s."""
    fabrics = [
        Fabric(nodes=3, ranks_per_node=5, rate=rate, latency=50e-3, inside_rate=inside)
        for rate in RATES
    ]
    return {
        name: [
            profile.compute / predict(offbeat.algorithm(text), profile, fabric, steps=100).seconds
            for fabric in fabrics
        ]
        for name, text in methods.items()
    }


def draw(panels: dict[str, dict[str, list[float]]]) -> None:
    """One panel for each model, with what internet/sites has measured if it has run."""
    path = files.result("internet/sites")
    runs = json.loads(path.read_text())["measured"] if path.exists() else []
    points = {each["method"]: each["computing"] for each in runs}
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    every = figure.subplots(1, 2, sharey=True)
    for axes, (title, found) in zip(every, panels.items(), strict=True):
        for name, values in found.items():
            (line,) = axes.plot(RATES / 1e6, values, label=name)
            if axes is every[0] and SMALL[name] in points:
                axes.plot([100], [points[SMALL[name]]], "o", color=line.get_color())
        axes.set(xscale="log", xlabel="Mbit/s between sites", title=title, ylim=(0, 1.02))
        axes.grid(alpha=0.25)
        axes.title.set_fontsize("medium")
    every[0].set_ylabel("share of time computing")
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(files.ASSETS / "internet.png", dpi=110)


@command(BENCH)
def app() -> Result:
    """Predict both models, and draw the picture."""
    large = read_profile(files.ASSETS / "gpt2.json")
    panels = {
        f"1.6 MB, a step of {STEP:g} s; points: measured": shares(SMALL, small(), 1e9),
        "124 M parameters, a step of 0.25 s": shares(LARGE, large, 100e9),
    }
    draw(panels)
    rows = [
        (title.split(",")[0], name, *(f"{values[i]:.1%}" for i in (0, 6, 12)))
        for title, found in panels.items()
        for name, values in found.items()
    ]
    share = next(iter(panels.values()))["streaming diloco"][0]
    claims = [at_least("streaming diloco of 1.6 MB computes at 10 Mbit/s", share, 0.95, "{:.1%}")]
    headings = ("model", "method", "10 Mbit/s", "100 Mbit/s", "1 Gbit/s")
    return Result("Predicted share of computing on three sites, 100 ms", headings, rows, claims)
