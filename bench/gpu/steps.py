"""Seconds of a training step on one GPU that several processes share; Gloo carries the messages.

All methods train copies of one model in the same processes, in turns. A message that is under way
at the end of a turn arrives in the next one. What methods do besides computing is hidden only as
far as the processes leave the GPU idle: several GPUs hide more.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

import offbeat
from bench.gpu.gpt2 import GPT2, SMALL, Shape
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.gpu import device_of, seconds_of
from bench.harness.ranks import on_nodes
from bench.harness.report import report

ALONE, TORCH, OURS = "alone", "torch DDP", "ddp()"
METHODS = (OURS, "sgp(overlap=1,wire='bf16')", "lags(density=0.001)", "daso(every=4)")
TURN, WARM_UP = 8, 2  # steps of a turn; turns that do not count
HEADINGS = ("method", "a step", "x alone", "x torch DDP")
BENCH = Bench(
    name="gpu/steps",
    claim="A step of ddp(), sgp, lags and daso on a GPU, beside torch's DDP and computing alone",
    minutes=8,
    gpu=True,
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Step = Callable[[], object]
Times = dict[str, list[float]]  # by method, seconds of a step in each turn


@dataclass(frozen=True)
class Question:
    """What to train, and how often every method has its turn."""

    shape: Shape
    turns: int
    device: str = "cuda"


def trainers(shape: Shape, device: torch.device) -> tuple[dict[str, Step], list[offbeat.Replica]]:
    """One training step of each method, and what is to be detached."""
    torch.manual_seed(0)
    start = GPT2(shape, device)
    size = shape.batch, shape.context
    tokens = torch.randint(shape.tokens, size, device=device)
    steps, replicas = {}, []
    for name in (ALONE, TORCH, *METHODS):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = None
        if name in METHODS:
            replica = offbeat.replicate(model, offbeat.algorithm(name), optimizer=optimizer)
            replicas.append(replica)
        run = DistributedDataParallel(model) if name == TORCH else model
        steps[name] = trainer(run, optimizer, replica, tokens)
    return steps, replicas


def trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    replica: offbeat.Replica | None,
    tokens: torch.Tensor,
) -> Step:
    """One step, in which matrices are multiplied in bfloat16."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        if replica is not None:
            replica.step()

    return step


def alternate(question: Question) -> Times:
    """Let all methods take turns, on every rank; seconds are those of the slowest rank."""
    device = torch.device(question.device)
    steps, replicas = trainers(question.shape, device)
    found: Times = {name: [] for name in steps}
    for turn in range(WARM_UP + question.turns):
        # The order alternates, so that a slow drift of the machine favours none.
        for name in sorted(steps, reverse=turn % 2 == 0):
            taken = slowest(steps[name])
            if turn >= WARM_UP:
                found[name].append(taken)
        if dist.get_rank() == 0:
            print(f"turn {turn + 1} of {WARM_UP + question.turns}", flush=True)
    for replica in replicas:
        replica.finish()
        replica.detach()
    return found


def slowest(step: Step) -> float:
    """Seconds per step of a turn on the slowest rank; all start together."""
    dist.barrier()
    seconds = seconds_of(lambda: [step() for _ in range(TURN)]) / TURN
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def over(found: Times, name: str, other: str) -> float:
    """The ratio of both times of a step, the median over turns."""
    return median(a / b for a, b in zip(found[name], found[other], strict=True))


def rows(found: Times) -> list[tuple[str, ...]]:
    """One line for each method."""
    return [
        (name, f"{median(times) * 1e3:.1f} ms",
         *(f"{over(found, name, other):.3f}" for other in (ALONE, TORCH)))
        for name, times in found.items()
    ]  # fmt: skip


def claims(found: Times) -> list[Claim]:
    """Goals are those of ddp(): what the others hide depends on the bandwidth."""
    ratio = over(found, OURS, TORCH)
    text = "a step of ddp() beside one of torch's DDP"
    made = [Claim(text, "at most 1.03 x", f"{ratio:.3f} x", ratio <= 1.03)]
    for name in METHODS[1:]:
        gain = over(found, OURS, name)
        made.append(Claim(f"{name}: faster than ddp()", "faster", f"{gain:.2f} x", gain > 1))
    return made


@app.command(epilog=BENCH.examples("--rate 10gbit"))
def main(
    processes: Annotated[int, typer.Option(help="Processes that share the GPU.")] = 4,
    turns: Annotated[int, typer.Option(help="Turns of each method.")] = 20,
    rate: Annotated[str, typer.Option(help="Of emulated links; loopback without root.")] = "",
) -> None:
    """Train GPT-2 small by all methods, every process as a node of its own."""
    name = torch.cuda.get_device_name(device_of(BENCH))
    question = Question(SMALL, turns)
    found: Any = on_nodes(alternate, question, processes, rate=rate or None, gpu=True)
    title = f"GPT-2 small, {processes} processes share one {name}, {rate or 'loopback'}"
    report(BENCH, title, HEADINGS, rows(found), claims(found), measured={"gpu": name, **found})


if __name__ == "__main__":
    app()
