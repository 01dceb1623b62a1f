"""The tasks of choose/sooner under torchft and decent-dp, and under the same methods here."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import inf

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.choose.runs import Runs
from bench.choose.tasks import TASKS, WORKERS
from bench.harness import GOAL, Bench, Result, at_most, attached, command, console
from bench.harness.attached import Attached, Build, warmed
from bench.harness.training import Times, Training, times
from bench.outer import rounds
from bench.outer.torchft import MISSING
from bench.sgp import decent_dp

DDP, RATE, WARM_UP = "ddp", "100mbit", 20  # steps over which rates grow
PEERS = {  # each with the same method here
    "torchft DDP": DDP,
    "torchft LocalSGD(8)": "local_sgd(every=8)",
    "torchft DiLoCo(8)": "diloco(every=8)",
    decent_dp.THEIRS: decent_dp.OURS,
}
BENCH = Bench(name="choose/peers", minutes=10)


def task(number: int) -> attached.Task:
    """One of the three, scored by every rank on all that is held out."""
    found = TASKS[number]
    (x, y), scored = found.data()

    def loss(module: nn.Module, random: torch.Generator) -> Tensor:
        chosen = torch.randint(len(x), (found.batch,), generator=random)
        return found.loss(module(x[chosen]), y[chosen])

    def heldout(model: nn.Module) -> Tensor:
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        own = [buffer.clone() for buffer in buffers]
        for buffer in buffers:  # some methods show the average of parameters alone
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())
        model.eval()
        score = found.score(model, *scored["heldout"])
        model.train()
        for buffer, kept in zip(buffers, own, strict=True):
            buffer.copy_(kept)
        return torch.tensor(score)

    torch.manual_seed(0)
    return attached.Task(found.net(), loss, heldout)


@dataclass(frozen=True)
class Attach:
    """Each method with its best rate of choose/sooner; a peer with that of the same method."""

    number: int
    rates: dict[str, float]

    def __call__(self, method: str, model: nn.Module, build: Build) -> Attached:
        ours = PEERS.get(method, method)
        build = partial(self.build, rate=self.rates[ours])
        attach = decent_dp.attach if method == decent_dp.THEIRS else rounds.attach
        return attach(method, model, build)

    def build(self, parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
        return warmed(TASKS[self.number].optimizer(parameters), rate, WARM_UP)


def reached(course: Times, target: float) -> float:
    """Seconds until the held-out loss is as low, between two looks in proportion."""
    seconds = np.cumsum(course.seconds)
    found = next((i for i, loss in enumerate(course.losses) if loss <= target), None)
    if not found:
        return inf if found is None else float(seconds[0])
    before, after = course.losses[found - 1], course.losses[found]
    return float(np.interp(target, (after, before), seconds[[found, found - 1]]))


def race(number: int, methods: tuple[str, ...], seconds: float) -> dict[str, Times]:
    """Train one task in turns, each method for the same number of seconds."""
    tuned = Runs.read(1).of(TASKS[number])
    rates = {recipe.removesuffix("()"): rate for recipe, rate in tuned.rates.items()}
    attach, turn = Attach(number, rates), 4 * rounds.EVERY
    training = Training(
        partial(task, number), methods, turn, seconds=seconds, lead=turn - 1, attach=attach
    )
    return times(training, WORKERS, RATE)


@command(BENCH)
def app(seconds: float = 18) -> Result:
    """Train all tasks at the rates of choose/sooner, and see when they reach ddp's last loss."""
    missing = [name for name in ("torchft", "decent_dp") if find_spec(name) is None]
    if missing:
        console.print(f"not installed, and left out: {', '.join(missing)}\n{MISSING}", markup=False)
    peers = {
        theirs: ours
        for theirs, ours in PEERS.items()
        if not any(theirs.startswith(name.replace("_", "-")) for name in missing)
    }
    methods, rows, slower, later = (*peers, *PEERS.values()), [], {}, {}
    found = {each.name: race(i, methods, seconds) for i, each in enumerate(TASKS)}
    for name, courses in found.items():
        target = courses[DDP].losses[-1]
        until = {method: reached(courses[method], target) for method in methods}
        for method, course in courses.items():
            ours = peers.get(method)
            soon = "-" if until[method] == inf else f"{until[method]:.1f} s"
            rows.append((
                name, method, f"{1e3 * course.step:.1f} ms", soon,
                f"{course.losses[-1]:.4g}", f"{courses[ours].over(course):.2f}" if ours else "",
            ))  # fmt: skip
            if ours:
                slower[f"{ours}, {name}"] = courses[ours].over(course)
                if min(until[ours], until[method]) < inf:
                    later[f"{ours}, {name}"] = until[ours] / until[method]
    claims = []
    for text, ratios in (
        ("a step takes as long as with peers", slower),
        ("the last loss of ddp is reached as soon", later),
    ):
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            claims.append(at_most(text, ratios[worst], 1.0, of=f"({worst})", source=GOAL))
    headings = ("task", "method", "a step", "until ddp's last loss", "last loss", "ours over it")
    title = f"{WORKERS} nodes, {RATE}, {seconds:g} s for each method"
    return Result(title, headings, rows, claims, found)
