"""Time of a step of `replicate(ddp())` relative to torch's DistributedDataParallel.

Both train the same model in the same processes, in turns. CPU and Gloo, one thread per worker.
"""

import copy
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from char_gpt import CHARACTERS, GPT
from rich.progress import track
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report

ROUND_SECONDS = 0.2  # long relative to a barrier, short relative to changes of a shared machine
WARM_UP = 10  # steps
HEADINGS = ("model", "workers", "torch DDP", "offbeat", "ratio", "95 %", "min - max")
BENCH = Bench(
    name="ddp/overhead",
    claim="ddp() takes no longer than torch's DDP",
    minutes=4,
    full_minutes=20,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Result:
    """Seconds per step of both, one value per round."""

    model: str
    parameters: int
    workers: int
    steps_per_round: int
    torch_ddp: list[float]
    offbeat: list[float]

    def ratio(self) -> float:
        """offbeat's median over torch's: below 1 offbeat is faster."""
        return float(np.median(self.offbeat) / np.median(self.torch_ddp))

    def spread(self) -> tuple[float, float]:
        """The smallest and the largest ratio of a round."""
        ratios = [ours / theirs for ours, theirs in zip(self.offbeat, self.torch_ddp, strict=True)]
        return min(ratios), max(ratios)

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the ratio: pairs of rounds drawn again, with replacement."""
        rounds = np.array([self.offbeat, self.torch_ddp])
        draws = np.random.default_rng(0).integers(rounds.shape[1], size=(4000, rounds.shape[1]))
        ours, theirs = np.median(rounds[:, draws], axis=2)
        low, high = np.quantile(ours / theirs, (0.025, 0.975))
        return float(low), float(high)


def convolutional() -> tuple[nn.Module, Tensor, Tensor]:
    """A small net for 28 x 28 images, and a batch of noise."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, torch.randn(32, 1, 28, 28), torch.randint(10, (32,))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """The GPT of the examples, and a batch of noise."""
    model = nn.Sequential(GPT(width=128, depth=2, heads=4, context=64), nn.Flatten(0, 1))
    tokens = torch.randint(len(CHARACTERS), (2, 8, 64))
    return model, tokens[0], tokens[1].flatten()


MODELS = {"conv": convolutional, "gpt": transformer}


def trainer(
    model: nn.Module, replica: offbeat.Replica | None, x: Tensor, y: Tensor
) -> Callable[[], None]:
    """One training step of a model that is already attached."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if replica is not None:
            replica.step()

    return step


def timed(step: Callable[[], None], steps: int) -> float:
    """Seconds per step of the slowest rank; all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def compare(name: str, rounds: int) -> Result:
    """Train both in turns."""
    torch.manual_seed(0)
    model, *_ = MODELS[name]()
    torch.manual_seed(1 + dist.get_rank())
    _, x, y = MODELS[name]()
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    replica = offbeat.replicate(ours, offbeat.ddp())
    steps = {
        "theirs": trainer(DistributedDataParallel(theirs), None, x, y),
        "ours": trainer(ours, replica, x, y),
    }
    _, slowest = (max([timed(step, WARM_UP) for step in steps.values()]) for _ in range(2))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg="the two must train alike")
    count = max(1, round(ROUND_SECONDS / slowest))  # the same on all ranks, as the times are
    times: dict[str, list[float]] = {side: [] for side in steps}
    title = f"{name}, {dist.get_world_size()} workers, {count} steps a round"
    console.quiet = dist.get_rank() > 0
    console.print(title)
    for i in track(range(rounds), "", console=console, disable=not console.is_terminal):
        # The order alternates, so that a slow drift of the machine favours neither side.
        for side in sorted(steps, reverse=i % 2 == 0):
            times[side].append(timed(steps[side], count))
    replica.detach()
    size = sum(p.numel() for p in model.parameters())
    return Result(name, size, dist.get_world_size(), count, times["theirs"], times["ours"])


def work(rank: int, world: int, rounds: int, folder: str) -> None:
    """One process: compare on every model; rank 0 leaves the results in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    results = [asdict(compare(name, rounds)) for name in MODELS]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def rows(results: list[Result]) -> list[tuple[str, ...]]:
    """One line for each model and number of workers."""
    lines = []
    for r in results:
        milliseconds = [f"{np.median(t) * 1e3:.2f} ms" for t in (r.torch_ddp, r.offbeat)]
        ranges = [f"{low:.2f} - {high:.2f}" for low, high in (r.interval(), r.spread())]
        lines.append((r.model, f"{r.workers}", *milliseconds, f"{r.ratio():.3f}", *ranges))
    return lines


def claims(results: list[Result]) -> list[Claim]:
    made = []
    for r in results:
        low, high = r.interval()
        text = f"{r.model}, {r.workers} workers: a step takes no longer than with torch's DDP"
        ours = f"{r.ratio():.3f} x ({low:.3f} - {high:.3f})"
        made.append(Claim(text, "at most 1.00 x, within 95 %", ours, low <= 1))
    return made


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the rounds.")] = False,
) -> None:
    """Compare on both models, with 2 and with 4 workers."""
    rounds = 600 if full else 120
    results: list[Result] = []
    console.print(f"{rounds} rounds for each model and number of workers")
    for world in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (world, rounds, folder), nprocs=world)
            found = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
        results += [Result(**case) for case in found]
    title = f"Seconds per step of ddp() relative to torch's DDP, {rounds} rounds"
    report(BENCH, title, HEADINGS, rows(results), claims(results), measured=results)


if __name__ == "__main__":
    app()
