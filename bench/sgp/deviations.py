"""Distance of the nodes' parameters from their mean over training (Figure 2 of the SGP paper).

Measured once per epoch, after the gradient step and before the exchange, on a sparse graph (one
peer) and on a complete one.
"""

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
BENCH = Bench(
    name="sgp/deviations",
    claim="Replica distances follow the rate (Fig. 2)",
    minutes=2,
    full_minutes=10,
    evidence={"Fig. 2": "Replicas are as far apart as the rate and the graph allow"},
)


def deviations(case: Case) -> NDArray[np.float64]:
    """Distances of all nodes from their mean at the end of each epoch, (epochs, nodes)."""
    models = [[torch.empty(0)] * case.workers for _ in range(EPOCHS)]
    every = case.steps // EPOCHS

    def look(replica: offbeat.Replica, step: int) -> None:
        if (step + 1) % every == 0:
            vector = parameters_to_vector(replica.model.parameters()).detach()
            models[step // every][replica.world.rank] = vector

    in_threads(case, look)
    stacked = [torch.stack(each) for each in models]
    return np.array([(each - each.mean(0)).norm(dim=1).tolist() for each in stacked])


def claims(rates: NDArray[np.float64], found: dict[str, NDArray[np.float64]]) -> list[Claim]:
    sparse, dense = (found[graph].mean(1) for graph in GRAPHS)
    drops = [float(sparse[e - 3 : e].mean() / sparse[e + 3 : e + 6].mean()) for e in (30, 60, 80)]
    alike = float(np.corrcoef(np.log(rates), np.log(sparse))[0, 1])
    unlike = float(np.median(found["sparse"].max(1) / found["sparse"].min(1)))
    above = float(np.median(sparse / dense))
    return [
        Claim("deviations follow the learning rate", "proportional",
              f"correlation of the logarithms {alike:.3f}", alike > 0.9),
        Claim("they fall by an order of magnitude with it", "10 x at epochs 30, 60, 80",
              ", ".join(f"{drop:.1f} x" for drop in drops), min(drops) > 5),
        Claim("they grow during the warm-up", "epochs 1 to 5",
              f"{sparse[4] / sparse[0]:.1f} x, the learning rate {rates[4] / rates[0]:.1f} x",
              bool(sparse[4] > sparse[0])),
        Claim("dense graphs deviate less than sparse ones", "markedly less",
              f"{above:.1f} x less", above > 1.1),
        Claim("all nodes are about equally far", "about the same",
              f"in the median epoch at most {unlike:.1f} x as far", unlike < 3),
    ]  # fmt: skip


@command(BENCH, "--full", full="Five times the steps.", steps="Of an epoch.")
def app(full: bool = False, workers: int = 16, steps: int = 4) -> Result:
    """Follow the parameters of 16 workers over 90 epochs, on a sparse and on a dense graph."""
    count = EPOCHS * steps * (5 if full else 1)
    cases = [digits_case(name, graph, workers, count) for name, graph in GRAPHS.items()]
    found = {case.name: deviations(case) for case in cases}
    rates = [cases[0].lr((epoch + 1) * count // EPOCHS - 1) for epoch in range(EPOCHS)]
    rows = []
    for number in SHOWN:
        nodes = [each[number - 1] for each in found.values()]
        cells = [f"{each.mean():.2e} ({each.min():.1e} - {each.max():.1e})" for each in nodes]
        rows.append((f"{number}", f"{rates[number - 1]:.1e}", *cells))
    title = f"Figure 2: distance from the mean of {workers} nodes (least - most)"
    headings = ("epoch", "learning rate", *GRAPHS)
    raw = {graph: each.tolist() for graph, each in found.items()}
    return Result(title, headings, rows, claims(np.array(rates), found), raw=raw)
