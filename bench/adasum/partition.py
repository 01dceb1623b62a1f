"""Time and memory of the optimizer when the ranks of a node share it (Table 1 of the paper).

Two nodes with four ranks each, LAMB on a transformer as for BERT in the paper, given gradients. The
update is timed with and without a partition in turns.
"""

import statistics
import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from pytorch_optimizer import Lamb

import offbeat
from bench.adasum.micro_batch import BATCHES, fitting, peaks
from bench.harness.bench import Bench
from bench.harness.claim import GOAL, Claim
from bench.harness.effect import Effect
from bench.harness.ranks import on_nodes
from bench.harness.report import report

NODES, RANKS, MICRO_BATCH = 2, 4, 8
PLAIN, SPLIT = "adasum(within='local')", "adasum(partition=True)"
BENCH = Bench(
    name="adasum/partition",
    claim="Ranks of a node share the optimizer (Table 1)",
    minutes=2,
    full_minutes=3,
    evidence={"Table 1": "Sharing the optimizer in a node halves the time of an update"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Worker:
    """One rank's model under one algorithm."""

    def __init__(self, algorithm: str, width: int, depth: int) -> None:
        from char_gpt import GPT  # imported late: only ranks need it

        torch.manual_seed(0)
        self.model = GPT(width, depth, 4, 64)
        self.replica = offbeat.replicate(self.model, offbeat.algorithm(algorithm))
        self.replica.set_requires_sync(False)  # gradients are given
        self.owned = self.replica.owned_parameters()
        self.optimizer = Lamb(self.owned, lr=1e-3)

    def update(self, step: int) -> tuple[float, float]:
        """Seconds for the optimizer, and for all of the update."""
        random = torch.Generator().manual_seed(10 * step + self.replica.world.node)
        owned = {id(p) for p in self.owned}
        for p in self.model.parameters():  # drawn for all: the same on the ranks of a node
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
    """Both algorithms in turns, on every rank; the maximum over ranks."""
    workers = {text: Worker(text, case["width"], case["depth"]) for text in (PLAIN, SPLIT)}
    seconds: dict[str, dict[str, list[float]]] = {
        text: {"optimizer": [], "update": []} for text in workers
    }
    for step in range(case["steps"] + 2):
        for text, worker in workers.items():
            mine = torch.tensor(worker.update(step))
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if step >= 2:
                for times, spent in zip(seconds[text].values(), mine.tolist(), strict=True):
                    times.append(spent)
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


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="A model four times as large.")] = False,
    rate: Annotated[str | None, typer.Option(help="Of a node's link; none: not limited.")] = None,
) -> None:
    """Time the update of a transformer with LAMB and Adasum, with and without a partition."""
    case = {"width": 512 if full else 256, "depth": 4, "steps": 20}
    found = on_nodes(measure, case, NODES, RANKS, rate)
    found["peaks"] = on_nodes(peaks, {**case, "algorithms": [PLAIN, SPLIT]}, NODES, RANKS, rate)
    middle = BATCHES.index(MICRO_BATCH)
    room = found["peaks"][PLAIN][middle]
    medians = {
        text: [statistics.median(times) for times in parts.values()]
        for text, parts in found["seconds"].items()
    }
    fits = {text: fitting(most, room) for text, most in found["peaks"].items()}
    rows = [
        (text, f"{found['bytes'][text] / 2**20:.1f} MiB", f"{alone:.3f} s", f"{whole:.3f} s",
         f"{found['peaks'][text][middle] / 2**20:.0f} MiB", f"{fits[text]:.1f}")
        for text, (alone, whole) in medians.items()
    ]  # fmt: skip
    memory = found["bytes"][PLAIN] / found["bytes"][SPLIT]
    alone, whole = (a / b for a, b in zip(medians[PLAIN], medians[SPLIT], strict=True))
    claims = [
        Claim.effect("an update takes less time", Effect(1.82 / 0.97, "x"), Effect(whole, "x")),
        Claim("the optimizer takes less time", "", f"{alone:.2f} x less", alone > 1.0, GOAL),
        Claim("a worker's moments take a quarter of the memory", "4 x less", f"{memory:.2f} x less",
              memory >= 3.8, GOAL),
        Claim.effect("a larger micro-batch takes the same memory", Effect(36 / 22, "x"),
                     Effect(fits[SPLIT] / fits[PLAIN], "x")),
        Claim("the models are the same", "", f"apart by {found['apart']:.1e}",
              found["apart"] < 1e-4, GOAL),
    ]  # fmt: skip
    title = f"{NODES} nodes, {RANKS} ranks each, {found['parameters'] / 1e6:.1f} M parameters"
    headings = ("algorithm", "moments a worker", "optimizer", "whole update",
                f"at most, micro-batch {MICRO_BATCH}", "micro-batch in this memory")  # fmt: skip
    report(BENCH, f"{title}, {rate or 'links not limited'}", headings, rows, claims,
           measured=found)  # fmt: skip


if __name__ == "__main__":
    app()
