"""Accuracy of SGP in the time that all-reduce needs (Table 5 of the paper).

A step of each method is timed on emulated nodes, with a pause for computation, as on an
accelerator; virtual workers then take as many steps as fit, on MNIST-1D.
"""

from statistics import fmean

import offbeat
from bench.harness import Bench, Claim, Effect, Result, command
from bench.harness.case import Pause
from bench.harness.rows import in_rows, signals_case
from bench.harness.seeds import Runs, over_seeds
from bench.sgp.task import LINK, times

AR = "AR-SGD"
METHODS = {AR: offbeat.ddp(), "SGP": offbeat.sgp(), "1-OSGP": offbeat.sgp(overlap=1)}
PAPER = {  # accuracies in training and validation in %, hours, epochs
    AR: (76.9, 76.2, 5.1, 90),
    "SGP": (80.0, 77.1, 4.6, 270),
    "1-OSGP": (81.8, 77.1, 2.7, 270),
}
WORKERS = 8  # the paper had 32 nodes
COMPUTE = Pause(0.1)  # beside 0.144 s for a model on the link
HEADINGS = ("method", "paper, train / val", "ours", "paper, x steps", "ours, x steps")
BENCH = Bench(
    name="sgp/budget",
    claim="SGP beats all-reduce in equal time (Table 5)",
    minutes=5,
    full_minutes=12,
    evidence={"Table 5": "More accurate than all-reduce in the same time"},
)


def claims(name: str, found: Runs, base: Runs) -> list[Claim]:
    text = f"in equal time {name} is more accurate than all-reduce"
    train, heldout = (Effect(a - b) for a, b in zip(PAPER[name][:2], PAPER[AR][:2], strict=True))
    return [
        Claim.effect(f"{text} in training", train, found.over(base, "train")),
        Claim.effect(f"{text} held out", heldout, found.over(base)),
    ]


@command(BENCH, "--full", full="Twice the seeds.", passes="Of all-reduce over the data.")
def app(full: bool = False, nodes: int = 8, seeds: int = 5, passes: float = 20.0) -> Result:
    """Give SGP and overlap SGP the time that all-reduce needs."""
    (timed,) = times(METHODS, nodes, 20, COMPUTE)
    fit = {name: timed[AR] / seconds for name, seconds in timed.items()}
    rows, found = [], {}
    for name, (train, heldout, hours, epochs) in PAPER.items():
        case = signals_case(name, METHODS[name], WORKERS, passes * fit[name])
        runs = found[name] = over_seeds(in_rows, case, seeds * (1 + full))
        paper = f"{train} / {heldout}%  {hours} h"
        ours = f"{fmean(runs['train']):.1f} / {runs}"
        rows.append((name, paper, ours, f"{epochs / 90:.1f}", f"{fit[name]:.2f}"))
    judged = [c for name in ("SGP", "1-OSGP") for c in claims(name, found[name], found[AR])]
    measured = {name: {"seconds": timed[name], "fit": fit[name], **found[name]} for name in found}
    title = f"Table 5: in the time of all-reduce, {LINK}"
    return Result(title, HEADINGS, rows, judged, measured=measured)
