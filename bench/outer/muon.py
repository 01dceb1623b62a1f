"""Muon as the inner optimizer of DiLoCo (MuLoCo) beside AdamW, at equal bytes.

A GPT of half a million parameters on four nodes with one rank each. Muon steps the matrices of the
blocks, AdamW all other parameters. All methods make equally many steps and exchanges; each
optimizer at three rates.
"""

from functools import partial
from math import inf

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from bench.harness import Bench, Claim, Result, attached, command
from bench.harness.attached import Attached, Build
from bench.harness.gpt import gpt_with_heldout
from bench.harness.training import Found, Training, times
from bench.outer.rounds import EVERY, LEAD

RECIPE = f"diloco(every={EVERY})"
RATES = (1e-3, 3e-3, 1e-2)
OPTIMIZERS = ("AdamW", "Muon")
METHODS = tuple(f"{name} {rate:g}" for name in OPTIMIZERS for rate in RATES)
WARM_UP = 10  # steps
TASK = partial(gpt_with_heldout, 256, context=64, width=128, depth=2, batch=4)
BENCH = Bench(name="outer/muon", claim="Muon inside DiLoCo beside AdamW, at equal bytes", minutes=5)


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
    hidden, rest = list[nn.Parameter](), list[nn.Parameter]()
    for path, p in model.named_parameters():
        (hidden if path.startswith("layers.") and p.ndim == 2 else rest).append(p)
    if name == "AdamW":
        return Together([AdamW([*hidden, *rest], rate)])
    muon = Muon(hidden, rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return Together([muon, AdamW(rest, rate)])


def attach(method: str, model: nn.Module, _: Build) -> Attached:
    """DiLoCo, with the optimizers and the rate of a method."""
    name, rate = method.split()
    return attached.attach(RECIPE, model, lambda _: optimizer(name, float(rate), model))


def best(found: Found, name: str) -> tuple[str, float]:
    """The better rate of an optimizer, and its last loss."""
    losses = {method: each.losses[-1] for method, each in found.items() if name in method}
    return min(losses.items(), key=lambda item: item[1])


def rows(found: Found) -> list[tuple[str, ...]]:
    """One line for each method."""
    return [
        (
            *method.split(), f"{each.step:.3f} s", f"{each.bytes / 1e6:.2f} MB",
            f"{each.losses[len(each.losses) // 2]:.3f}", f"{each.losses[-1]:.3f}",
        )
        for method, each in found.items()
    ]  # fmt: skip


@command(BENCH, "--rounds 60")
def app(nodes: int = 4, rate: str = "250mbit", rounds: int = 30) -> Result:
    """Train a GPT by DiLoCo with both inner optimizers, at three rates each."""
    training = Training(TASK, METHODS, EVERY, rounds, inf, LEAD, attach=attach)
    found = times(training, nodes, rate)
    (adamw, theirs), (muon, ours) = (best(found, name) for name in OPTIMIZERS)
    over = found[muon].over(found[adamw])
    judged = [
        Claim("at equal bytes Muon reaches a lower loss than AdamW", "lower",
              f"{ours:.3f} against {theirs:.3f}", ours < theirs),
    ]  # fmt: skip
    steps = next(iter(found.values())).steps
    middle = sum(steps[: len(steps) // 2 + 1])
    ends = f"loss after {middle} steps", f"after {sum(steps)}"
    headings = ("inner", "rate", "a step", "sent a step", *ends)
    title = f"DiLoCo, a GPT, {nodes} nodes, {rate}; a step with Muon takes {over:.2f} x AdamW's"
    return Result(title, headings, rows(found), judged, found)
