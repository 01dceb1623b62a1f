"""Table 1 of the Adasum paper: the ranks of a node share the layers, and with them the optimizer.

Two nodes with two ranks each, Adam on a transformer. Gradients are given, as in the paper's last
row: what is timed is the optimizer and Adasum, with and without a partition in turns.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _claims import Claim, report
from _ranks import on_nodes, run_rank

import offbeat

NODES, RANKS = 2, 2
PLAIN, SPLIT = "adasum(within='local')", "adasum(partition=True)"
EPILOG = "Examples: `python bench/adasum_partition.py`, `python bench/adasum_partition.py --full`"
app = typer.Typer(pretty_exceptions_enable=False)


class Worker:
    """One rank's model under one algorithm."""

    def __init__(self, algorithm: str, width: int, depth: int) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        from char_gpt import GPT  # here: the process that starts the nodes can do without

        torch.manual_seed(0)
        self.model = GPT(width, depth, 4, 64)
        self.replica = offbeat.replicate(self.model, offbeat.algorithm(algorithm))
        self.replica.set_requires_sync(False)  # gradients are given
        self.owned = self.replica.owned_parameters()
        self.optimizer = torch.optim.Adam(self.owned, lr=1e-3)

    def update(self, step: int) -> tuple[float, float]:
        """Seconds for the optimizer, and for all of the update."""
        random = torch.Generator().manual_seed(10 * step + self.replica.groups.node)
        owned = {id(p) for p in self.owned}
        for p in self.model.parameters():  # drawn for all: ranks of a node get the same
            grad = torch.randn(p.shape, generator=random)
            p.grad = grad if id(p) in owned else None
        dist.barrier()
        started = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.replica.step()
        return stepped - started, time.perf_counter() - started

    def state_bytes(self) -> int:
        """Of the optimizer's moments."""
        states = self.optimizer.state.values()
        return sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Both algorithms in turns; of all ranks the slowest and the fullest."""
    workers = {text: Worker(text, case["width"], case["depth"]) for text in (PLAIN, SPLIT)}
    seconds: dict[str, list[tuple[float, float]]] = {text: [] for text in workers}
    for step in range(case["steps"] + 2):
        for text, worker in workers.items():
            mine = torch.tensor(worker.update(step))
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if step >= 2:
                seconds[text].append(tuple(mine.tolist()))
    held = {text: torch.tensor(worker.state_bytes()) for text, worker in workers.items()}
    for count in held.values():
        dist.all_reduce(count, dist.ReduceOp.MAX)
    pairs = zip(*(w.model.parameters() for w in workers.values()), strict=True)
    apart = max((a - b).abs().max().item() for a, b in pairs)
    size = sum(p.numel() for p in workers[PLAIN].model.parameters())
    for worker in workers.values():
        worker.replica.detach()
    bytes_held = {text: int(count) for text, count in held.items()}
    return {"seconds": seconds, "bytes": bytes_held, "apart": apart, "parameters": size}


@app.command(epilog=EPILOG)
def main(
    full: Annotated[bool, typer.Option("--full", help="A model four times as large.")] = False,
    rate: Annotated[str | None, typer.Option(help="Of a node's link; none: not limited.")] = None,
    rank: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time the update of a transformer with Adam and Adasum, with and without a partition."""
    if rank is not None:
        run_rank(rank, measure)
        return
    case = {"width": 512 if full else 256, "depth": 4, "steps": 20}
    found = on_nodes(__file__, case, NODES, RANKS, rate)
    medians = {
        text: [statistics.median(column) for column in zip(*times, strict=True)]
        for text, times in found["seconds"].items()
    }
    rows = [
        (text, f"{found['bytes'][text] / 2**20:.1f} MiB", f"{alone:.3f} s", f"{whole:.3f} s")
        for text, (alone, whole) in medians.items()
    ]
    memory = found["bytes"][PLAIN] / found["bytes"][SPLIT]
    alone, whole = (a / b for a, b in zip(medians[PLAIN], medians[SPLIT], strict=True))
    claims = [
        Claim("an update takes less time", "1.87 x less", f"{whole:.2f} x less", whole > 1.0),
        Claim("the optimizer takes less time", "", f"{alone:.2f} x less", alone > 1.0),
        Claim("a worker's moments take half the memory", "2 x less", f"{memory:.2f} x less",
              memory >= 1.9),
        Claim("the models are the same", "", f"apart by {found['apart']:.1e}",
              found["apart"] < 1e-4),
    ]  # fmt: skip
    title = f"{NODES} nodes, {RANKS} ranks each, {found['parameters'] / 1e6:.1f} M parameters"
    headings = ("algorithm", "moments a worker", "optimizer", "whole update")
    report("adasum_partition", f"{title}, {rate or 'links not limited'}", headings, rows, claims,
           **found)  # fmt: skip


if __name__ == "__main__":
    app()
