"""Replicas are as far apart as the rate and the graph allow."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils import parameters_to_vector

import offbeat
from bench.harness import Bench, Claim, Result, command
from bench.harness.case import Case
from bench.harness.seeds import in_threads
from bench.sgp.task import digits_case

EPOCHS = 90
GRAPHS = {"sparse": offbeat.sgp(), "dense": offbeat.sgp("complete")}
SHOWN = (1, 5, 29, 31, 45, 59, 61, 75, 79, 81, 90)
HEADINGS = ("epoch", "learning rate", *GRAPHS)
BENCH = Bench(name="sgp/deviations", minutes=2, full_minutes=10, evidence="Fig. 2")


def deviations(case: Case) -> NDArray[np.float64]:
    """Of all nodes from their mean, before the last exchange of each epoch, (epochs, nodes)."""
    models = [[torch.empty(0)] * case.workers for _ in range(EPOCHS)]
    every = case.steps // EPOCHS

    def look(replica: offbeat.Replica, step: int) -> None:
        if (step + 1) % every == 0:
            vector = parameters_to_vector(replica.model.parameters()).detach()
            models[step // every][replica.world.rank] = vector

    in_threads(case, look)
    stacked = [torch.stack(each) for each in models]
    return np.array([(each - each.mean(0)).norm(dim=1).tolist() for each in stacked])


@command(BENCH, "--full", full={"steps": 20}, steps="Of an epoch.")
def app(workers: int = 16, steps: int = 4) -> Result:
    """Follow the parameters of 16 workers over 90 epochs, on a sparse and on a dense graph."""
    count = EPOCHS * steps
    cases = [digits_case(name, graph, workers, count) for name, graph in GRAPHS.items()]
    rates = [cases[0].lr((epoch + 1) * count // EPOCHS - 1) for epoch in range(EPOCHS)]
    found = {case.name: deviations(case) for case in cases}
    rows = [
        (
            f"{epoch}", f"{rates[epoch - 1]:.1e}",
            *(f"{x.mean():.2e} ({x.min():.1e} - {x.max():.1e})"
              for x in (each[epoch - 1] for each in found.values())),
        )
        for epoch in SHOWN
    ]  # fmt: skip
    sparse, dense = (each.mean(1) for each in found.values())
    drops = [sparse[e - 3 : e].mean() / sparse[e + 3 : e + 6].mean() for e in (30, 60, 80)]
    alike = np.corrcoef(np.log(rates), np.log(sparse))[0, 1]
    unlike = np.median(found["sparse"].max(1) / found["sparse"].min(1))
    less = np.median(sparse / dense)
    claims = [
        Claim("deviations follow the learning rate", "proportional",
              f"correlation of the logarithms {alike:.3f}", bool(alike > 0.9)),
        Claim("they fall by an order of magnitude with it", "10 x at epochs 30, 60, 80",
              ", ".join(f"{drop:.1f} x" for drop in drops), bool(min(drops) > 5)),
        Claim("they grow during the warm-up", "epochs 1 to 5",
              f"{sparse[4] / sparse[0]:.1f} x, the learning rate {rates[4] / rates[0]:.1f} x",
              bool(sparse[4] > sparse[0])),
        Claim("dense graphs deviate less than sparse ones", "markedly less",
              f"{less:.1f} x less", bool(less > 1.1)),
        Claim("all nodes are about equally far", "about the same",
              f"in the median epoch at most {unlike:.1f} x as far", bool(unlike < 3)),
    ]  # fmt: skip
    title = f"Figure 2: distance from the mean of {workers} nodes (least - most)"
    return Result(title, HEADINGS, rows, claims)
