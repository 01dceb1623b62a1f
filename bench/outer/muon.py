"""Inside DiLoCo Muon (MuLoCo) reaches a lower loss than AdamW, at equal bytes."""

from functools import partial
from math import inf

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from bench.harness import Bench, Result, attached, command, less
from bench.harness.attached import Attached, Build
from bench.harness.gpt import gpt_with_heldout
from bench.harness.training import Training, times
from bench.outer.rounds import EVERY, LEAD

ADAMW, MUON = "AdamW", "Muon"
METHODS = tuple(f"{name} {rate:g}" for name in (ADAMW, MUON) for rate in (1e-3, 3e-3, 1e-2))
WARM_UP = 10  # steps
TASK = partial(gpt_with_heldout, 256, context=64, width=128, depth=2, batch=4)  # half a million
BENCH = Bench(name="outer/muon", minutes=5)


class Together(Optimizer):
    """Optimizers that step together, whose rates warm up."""

    def __init__(self, parts: list[Optimizer]) -> None:
        super().__init__([p for each in parts for g in each.param_groups for p in g["params"]], {})
        self.groups = [(g, g["lr"]) for each in parts for g in each.param_groups]
        self.parts, self.steps = parts, 0

    def step(self, closure: object = None) -> None:
        self.steps += 1
        for group, rate in self.groups:
            group["lr"] = rate * min(1.0, self.steps / WARM_UP)
        for each in self.parts:
            each.step()


def optimizer(name: str, rate: float, model: nn.Module) -> Optimizer:
    """Muon for the matrices of the blocks and AdamW for all else, or AdamW for all."""
    if name == ADAMW:
        return Together([AdamW(model.parameters(), rate)])
    hidden, rest = list[nn.Parameter](), list[nn.Parameter]()
    for path, p in model.named_parameters():
        (hidden if path.startswith("layers.") and p.ndim == 2 else rest).append(p)
    muon = Muon(hidden, rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return Together([muon, AdamW(rest, rate)])


def attach(method: str, model: nn.Module, _: Build) -> Attached:
    name, rate = method.split()
    inner = optimizer(name, float(rate), model)
    return attached.attach(f"diloco(every={EVERY})", model, lambda _: inner)


@command(BENCH, "--rounds 60")
def app(nodes: int = 4, rate: str = "250mbit", rounds: int = 30) -> Result:
    """Train a GPT by DiLoCo with both inner optimizers, at three rates each."""
    found = times(Training(TASK, METHODS, EVERY, rounds, inf, LEAD, attach=attach), nodes, rate)
    rows = [
        (
            *method.split(), f"{each.step:.3f} s", f"{each.bytes / 1e6:.2f} MB",
            f"{each.losses[len(each.losses) // 2]:.3f}", f"{each.losses[-1]:.3f}",
        )
        for method, each in found.items()
    ]  # fmt: skip
    adamw, muon = (
        min((found[method] for method in METHODS if name in method), key=lambda x: x.losses[-1])
        for name in (ADAMW, MUON)
    )
    text = "at equal bytes Muon reaches a lower loss than AdamW"
    claims = [less(text, muon.losses[-1], adamw.losses[-1])]
    middle = sum(muon.steps[: len(muon.steps) // 2 + 1])
    ends = f"loss after {middle} steps", f"after {sum(muon.steps)}"
    headings = ("inner", "rate", "a step", "sent a step", *ends)
    over = f"a step with Muon takes {muon.over(adamw):.2f} x AdamW's"
    return Result(f"DiLoCo, a GPT, {nodes} nodes, {rate}; {over}", headings, rows, claims, found)
