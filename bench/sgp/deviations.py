"""Distance of the nodes' parameters from their mean over training (Figure 2 of the SGP paper).

Measured once per epoch, after the gradient step and before the exchange, on a sparse graph (one
peer) and on a complete one.
"""

from collections import defaultdict
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from bench.sgp.task import BATCH, Case, in_threads

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
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def deviations(case: Case) -> list[list[float]]:
    """Distances of all nodes from their mean, at the end of each epoch."""
    models: dict[int, dict[int, Tensor]] = defaultdict(dict)
    every = case.steps // EPOCHS

    def look(rank: int, step: int, model: nn.Module) -> None:
        if (step + 1) % every == 0:
            models[step // every][rank] = parameters_to_vector(model.parameters()).detach()

    in_threads(case, look)
    stacked = [torch.stack([by_rank[r] for r in sorted(by_rank)]) for by_rank in models.values()]
    return [(each - each.mean(0)).norm(dim=1).tolist() for each in stacked]


def claims(case: Case, found: dict[str, list[list[float]]]) -> list[Claim]:
    mean = {graph: np.array(all_nodes).mean(1) for graph, all_nodes in found.items()}
    every = case.steps // EPOCHS
    rates = np.array([case.lr((epoch + 1) * every - 1) for epoch in range(EPOCHS)])
    sparse, dense = mean["sparse"], mean["dense"]
    drops = [float(sparse[e - 3 : e].mean() / sparse[e + 3 : e + 6].mean()) for e in (30, 60, 80)]
    alike = float(np.corrcoef(np.log(rates), np.log(sparse))[0, 1])
    unlike = float(np.median([max(nodes) / min(nodes) for nodes in found["sparse"]]))
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


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the steps.")] = False,
    world: Annotated[int, typer.Option(help="Virtual workers.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps of an epoch.")] = 4,
) -> None:
    """Follow the parameters of 16 workers over 90 epochs, on a sparse and on a dense graph."""
    count = EPOCHS * steps * (5 if full else 1)
    cases = {n: Case(n, graph, world, BATCH * world * count) for n, graph in GRAPHS.items()}
    console.print(f"{world} workers, {count} steps on each graph")
    found = {name: deviations(case) for name, case in cases.items()}
    rows = []
    for epoch in SHOWN:
        rate = cases["sparse"].lr(epoch * count // EPOCHS - 1)
        cells = [f"{np.mean(f[epoch - 1]):.2e} ({min(f[epoch - 1]):.1e} - {max(f[epoch - 1]):.1e})"
                 for f in found.values()]  # fmt: skip
        rows.append((f"{epoch}", f"{rate:.1e}", *cells))
    title = f"Figure 2: distance from the mean of {world} nodes (least - most)"
    headings = ("epoch", "learning rate", *GRAPHS)
    report(BENCH, title, headings, rows, claims(cases["sparse"], found), raw=found)


if __name__ == "__main__":
    app()
