"""Table 4 and Figure 3 of the Adasum paper in small: epochs and time to a target accuracy.

LeNet-5 on generated digits, four nodes. A rank's batch is 16 images, or eight times that. As in
the scripts that the paper took, the learning rate is multiplied by the micro-batches of a step, and
with an all-reduce by the number of ranks too; nothing is tuned for the large batch.
"""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _claims import Claim, report
from _ranks import on_nodes, run_rank
from torch.nn.functional import cross_entropy

import offbeat

NODES, BATCH, TIMES = 4, 16, 8
EPILOG = "Examples: `python bench/adasum_epochs.py`, `python bench/adasum_epochs.py --lr 0.005`"
app = typer.Typer(pretty_exceptions_enable=False)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Train each way; accuracy after every epoch, and the seconds that the epochs took."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import digits
    from adasum_lenet import accuracy, lenet

    data = digits.generated(case["images"], seed=0)
    held = digits.generated(2000, seed=1)
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


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="60,000 images instead of 12,000.")] = False,
    lr: Annotated[float, typer.Option(help="Of one rank's batch of 16.")] = 0.01,
    target: Annotated[float, typer.Option(help="Accuracy on held-out digits.")] = 0.99,
    epochs: Annotated[int, typer.Option(help="After which a run is given up.")] = 20,
    rate: Annotated[str, typer.Option(help="Of every node's link.")] = "250mbit",
    rank: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train LeNet-5 to a target accuracy with a small and an eight times larger batch."""
    if rank is not None:
        run_rank(rank, measure)
        return
    runs = [(method, times) for times in (1, TIMES) for method in ("ddp", "adasum")]
    case = {"runs": runs, "lr": lr, "target": target, "epochs": epochs,
            "images": 60000 if full else 12000}  # fmt: skip
    small, small_adasum, large, large_adasum = found = on_nodes(__file__, case, NODES, rate=rate)
    took = {id(run): len(run["accuracy"]) if run["accuracy"][-1] >= target else None
            for run in found}  # fmt: skip
    ratio = small_adasum["seconds"] / large_adasum["seconds"]
    reached = took[id(large_adasum)] is not None
    claims = [
        Claim("small batch: both need about the same number of epochs", "62 and 62",
              f"{took[id(small)]} and {took[id(small_adasum)]}",
              took[id(small)] is not None and took[id(small)] == took[id(small_adasum)]),
        Claim("8 x the batch: all-reduce does not get there", "never in 120",
              f"{took[id(large)] or 'never'}", took[id(large)] is None),
        Claim("8 x the batch: Adasum does", "69, for 62 with the small one",
              f"{took[id(large_adasum)] or 'never'}", reached),
        Claim("Adasum is there sooner with the large batch", "2.3 x",
              f"{ratio:.1f} x" if reached else "never", reached and ratio > 1),
    ]  # fmt: skip
    headings = ("method", "batch", f"epochs to {target:.1%}", "an epoch", "time", "best")
    title = f"LeNet-5 on {NODES} nodes, {rate}"
    report(
        "adasum_epochs", title, headings, [row(run, target) for run in found], claims, runs=found
    )


if __name__ == "__main__":
    app()
