"""A step of ``ddp()`` on one GPU that processes share is as fast as torch's DDP, others faster."""

from functools import partial

import torch
from torch import Tensor, nn

from bench.gpu.device import device_of
from bench.gpu.gpt2 import GPT2, SMALL, Shape
from bench.harness import Bench, Claim, Result, at_most, command
from bench.harness.attached import ALONE, TORCH, Task
from bench.harness.training import Found, Training, times

OURS = "ddp()"
METHODS = (OURS, "sgp(overlap=1,wire='bf16')", "lags(density=0.001)", "daso(every=4)")
TURN, WARM_UP = 8, 16  # steps; a message that is under way at the end of a turn arrives in the next
HEADINGS = ("method", "a step", "x alone", "x torch DDP")
BENCH = Bench(name="gpu/steps", minutes=8, gpu=True)


def task(shape: Shape, device: str = "cuda") -> Task:
    """GPT-2 on one batch, whose matrices are multiplied in bfloat16."""
    model = GPT2(shape, torch.device(device))
    tokens = torch.randint(shape.tokens, (shape.batch, shape.context), device=device)

    def loss(module: nn.Module, _: torch.Generator) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            found: Tensor = module(tokens)
        return found

    ended = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Task(model, loss, ended=ended)


def training(shape: Shape, turns: int, device: str = "cuda") -> Training:
    make, sgd = partial(task, shape, device), partial(torch.optim.SGD, lr=0.01)
    methods = ALONE, TORCH, *METHODS
    return Training(make, methods, TURN, turns, lead=WARM_UP, optimizer=sgd)


def rows(found: Found) -> list[tuple[str, ...]]:
    return [
        (name, f"{each.step * 1e3:.1f} ms",
         *(f"{each.over(found[other]):.3f}" for other in (ALONE, TORCH)))
        for name, each in found.items()
    ]  # fmt: skip


def claims(found: Found) -> list[Claim]:
    """Goals are those of ddp(): what the others hide depends on the bandwidth."""
    ratio = found[OURS].over(found[TORCH])
    made = [at_most("a step of ddp() beside one of torch's DDP", ratio, 1.03, "{:.3f} x")]
    for name in METHODS[1:]:
        gain = found[OURS].over(found[name])
        made.append(Claim(f"{name}: faster than ddp()", "faster", f"{gain:.2f} x", gain > 1))
    return made


@command(
    BENCH, "--rate 10gbit", processes="Processes that share the GPU.",
    turns="Turns of each method.", rate="Of emulated links; loopback without root.",
)  # fmt: skip
def app(processes: int = 4, turns: int = 20, rate: str = "") -> Result:
    """Train GPT-2 small by all methods, every process as a node of its own, over Gloo."""
    name = torch.cuda.get_device_name(device_of(BENCH))
    found = times(training(SMALL, turns), processes, rate or None, gpu=True)
    title = f"GPT-2 small, {processes} processes share one {name}, {rate or 'loopback'}"
    return Result(title, HEADINGS, rows(found), claims(found), {"gpu": name, **found})
