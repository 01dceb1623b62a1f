"""Epochs and time to a target accuracy (Table 4, Figure 3 of the Adasum paper).

LeNet-5 on 8,000 real digits, four nodes. A rank's batch is 16 images, or eight times that. The
learning rate is multiplied by the micro-batches of a step, and with an all-reduce by the number of
ranks too, as in the paper; nothing is tuned for the large batch.
"""

import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.functional import cross_entropy

import offbeat
from bench.adasum.real_digits import real
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.effect import Effect
from bench.harness.ranks import on_nodes
from bench.harness.report import report

NODES, BATCH, TIMES = 4, 16, 8
BENCH = Bench(
    name="adasum/epochs",
    claim="Adasum converges at 8 x the batch (Table 4)",
    minutes=3,
    evidence={"Table 4, Fig. 3": "Converges at 8 times the batch, where an all-reduce does not"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with each method and batch, on every rank; accuracy and seconds after each epoch."""
    from bench.adasum.network import accuracy, lenet

    data, held = real()
    found = []
    for method, times in case["runs"]:
        torch.manual_seed(0)
        model = lenet()
        replica = offbeat.replicate(model, offbeat.algorithm(method))
        scale = times * (NODES if method == "ddp" else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=case["lr"] * scale, momentum=0.9)
        seconds, reached = 0.0, []
        for epoch in range(case["epochs"]):
            order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch))
            dist.barrier()
            started = time.perf_counter()
            for batch in order.split(NODES * BATCH * times):
                mine = batch.chunk(NODES)[dist.get_rank()]
                cross_entropy(model(data[0][mine]), data[1][mine]).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
            dist.barrier()
            seconds += time.perf_counter() - started
            reached.append(accuracy(model, held))
            if (
                not all(p.isfinite().all() for p in model.parameters())
                or reached[-1] >= case["target"]
            ):
                break
        replica.detach()
        found.append({"method": method, "times": times, "accuracy": reached, "seconds": seconds})
        if dist.get_rank() == 0:
            print(f"{method}, {times} x {BATCH}: {reached[-1]:.2%} after {len(reached)} epochs")
    return found


def row(run: dict[str, Any], target: float) -> tuple[str, ...]:
    epochs, best = len(run["accuracy"]), max(run["accuracy"])
    holds = best >= target
    return (
        run["method"],
        f"{NODES * BATCH * run['times']}",
        f"{epochs}" if holds else f"never in {epochs}",
        f"{run['seconds'] / epochs:.2f} s",
        f"{run['seconds']:.1f} s" if holds else "-",
        f"{best:.2%}",
    )


@app.command(epilog=BENCH.examples("--lr 0.005"))
def main(
    lr: Annotated[float, typer.Option(help="Of one rank's batch of 16.")] = 0.01,
    target: Annotated[float, typer.Option(help="Accuracy on held-out digits.")] = 0.96,
    epochs: Annotated[int, typer.Option(help="After which a run ends without reaching it.")] = 20,
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
) -> None:
    """Train LeNet-5 to a target accuracy with a small and an eight times larger batch."""
    runs = [(method, times) for times in (1, TIMES) for method in ("ddp", "adasum")]
    case = {"runs": runs, "lr": lr, "target": target, "epochs": epochs}
    try:
        real()  # fetched before the ranks read it: their nodes have no way out
    except OSError as error:
        console.print(f"{BENCH.name} is left out: its digits cannot be fetched ({error})")
        return
    small, small_adasum, large, large_adasum = found = on_nodes(measure, case, NODES, rate=rate)
    took = {id(run): len(run["accuracy"]) if run["accuracy"][-1] >= target else None
            for run in found}  # fmt: skip
    ratio = small_adasum["seconds"] / large_adasum["seconds"]
    reached = took[id(large_adasum)] is not None
    claims = [
        Claim("small batch: both need about the same number of epochs", "62 and 62",
              f"{took[id(small)]} and {took[id(small_adasum)]}",
              abs((took[id(small)] or epochs) - (took[id(small_adasum)] or 0)) <= 1),
        Claim("8 x the batch: all-reduce does not reach the target", "never in 120",
              f"{took[id(large)] or 'never'}", took[id(large)] is None),
        Claim("8 x the batch: Adasum reaches it", "69, for 62 with the small one",
              f"{took[id(large_adasum)] or 'never'}", reached),
        Claim.effect("Adasum reaches it sooner with the large batch", Effect(2.3, "x"),
                     Effect(ratio if reached else 0.0, "x")),
    ]  # fmt: skip
    headings = ("method", "batch", f"epochs to {target:.1%}", "an epoch", "time", "best")
    title = f"LeNet-5 on {NODES} nodes, {rate}"
    report(BENCH, title, headings, [row(run, target) for run in found], claims, raw=found)


if __name__ == "__main__":
    app()
