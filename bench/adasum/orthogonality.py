"""Orthogonality of the workers' updates, layer by layer (Figure 2 of the Adasum paper).

A residual network and a transformer, four virtual workers, SGD with momentum. The learning rate
falls to a tenth twice; the paper reports drops of orthogonality there.
"""

from collections.abc import Callable
from typing import Annotated

import digits
import torch
import typer
from char_gpt import GPT, loss_of, read_corpus
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.report import report
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

WORKERS, BATCH, CONTEXT, POINTS = 4, 16, 64, 24
MOMENTS = {
    "start": 0,
    "before 1st fall": POINTS // 2 - 1,
    "after 1st fall": POINTS // 2,
    "before 2nd fall": 3 * POINTS // 4 - 1,
    "after 2nd fall": 3 * POINTS // 4,
    "end": POINTS - 1,
}
BENCH = Bench(
    name="adasum/orthogonality",
    claim="Updates become orthogonal over training (Fig. 2)",
    minutes=3,
    full_minutes=15,
    evidence={"Fig. 2": "Updates become orthogonal; less so where the rate falls"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Loss = Callable[[nn.Module, torch.Generator], Tensor]  # (model, random) -> loss of a fresh batch
Curve = list[dict[str, float]]


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the input beside them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        kinds = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        again = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.layers = nn.Sequential(*kinds, nn.ReLU(), *again)

    def forward(self, x: Tensor) -> Tensor:
        return relu(x + self.layers(x))


def resnet() -> nn.Module:
    """Three residual blocks on 28 x 28 images."""
    blocks = [nn.Sequential(Residual(16), nn.MaxPool2d(2)) for _ in range(2)]
    head = [Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), *blocks, *head)


def of_images() -> Loss:
    """Cross-entropy on generated digits."""
    images, labels = digits.generated(20000, seed=0)

    def loss(model: nn.Module, random: torch.Generator) -> Tensor:
        chosen = torch.randint(len(images), (BATCH,), generator=random)
        return cross_entropy(model(images[chosen]), labels[chosen])

    return loss


def of_text() -> Loss:
    """Cross-entropy on the standard library's sources."""
    text, _ = read_corpus()

    def loss(model: nn.Module, random: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=random)
        return loss_of(model, text, starts, CONTEXT)

    return loss


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Loss], float]] = {
    "resnet": (resnet, of_images, 0.05),
    "gpt": (lambda: GPT(64, 2, 4, CONTEXT), of_text, 0.1),
}


def measure(name: str, steps: int) -> Curve:
    """Train, and read the orthogonality; each point is the mean over its steps."""
    make, data, lr = PROBLEMS[name]
    loss = data()

    def worker(world: World) -> Curve:
        model = make()
        replica = offbeat.replicate(model, offbeat.adasum(), mesh=world)
        random = torch.Generator().manual_seed(world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        falls = [steps // 2, 3 * steps // 4]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, gamma=0.1)
        seen = []
        for _ in range(steps):
            loss(model, random).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            seen.append(replica.stats()["measures"])
            schedule.step()
        replica.detach()
        return averaged(seen)

    torch.manual_seed(0)
    return ThreadWorld(WORKERS).run(worker, timeout=600.0)[0]


def averaged(seen: Curve) -> Curve:
    """``POINTS`` means over as many equal runs of steps."""
    width = len(seen) // POINTS
    runs = [seen[i * width : (i + 1) * width] for i in range(POINTS)]
    return [{key: sum(m.get(key, 0.0) for m in run) / width for key in run[0]} for run in runs]


def rows(curves: dict[str, Curve]) -> list[tuple[str, ...]]:
    """Mean, lowest and highest layer over training."""
    lines = []
    for name, curve in curves.items():
        cells = []
        for moment in MOMENTS.values():
            layers = [v for key, v in curve[moment].items() if key.startswith("orthogonality/")]
            mean = curve[moment]["orthogonality"]
            cells.append(f"{mean:.2f} ({min(layers):.2f} - {max(layers):.2f})")
        lines.append((name, *cells))
    return lines


def claims(curves: dict[str, Curve]) -> list[Claim]:
    made = []
    for name, curve in curves.items():
        mean = [point["orthogonality"] for point in curve]
        falls = [mean[i] - mean[i - 1] for i in (POINTS // 2, 3 * POINTS // 4)]
        changes = ", ".join(f"{change:+.2f}" for change in falls)
        made += [
            Claim(f"{name}: orthogonality rises over training", "towards 1",
                  f"{mean[0]:.2f} to {mean[-1]:.2f}", mean[-1] > mean[0]),
            Claim(f"{name}: it drops where the learning rate falls", "drops", changes,
                  max(falls) < 0),
        ]  # fmt: skip
    return made


@app.command(epilog=BENCH.examples("--full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Five times the steps.")] = False,
) -> None:
    """Measure both models."""
    torch.set_num_threads(1)
    steps = 2400 if full else 480
    curves = {name: measure(name, steps) for name in PROBLEMS}
    title = f"Orthogonality of {WORKERS} workers' updates over {steps} steps, mean (layers)"
    report(BENCH, title, ("model", *MOMENTS), rows(curves), claims(curves), raw=curves)


if __name__ == "__main__":
    app()
