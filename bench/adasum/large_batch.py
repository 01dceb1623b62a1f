"""Steps to a target loss with Adam and with LAMB (Table 2 of the Adasum paper).

Eight virtual workers train a small GPT. Learning rates are tuned with one worker; all-reduce and
Adasum use them unchanged on eight times the batch, or tuned too with --full.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from char_gpt import GPT, loss_of, read_corpus
from pytorch_optimizer import Lamb
from torch import Tensor

import offbeat
from bench.harness.bench import Bench
from bench.harness.claim import Claim
from bench.harness.console import console
from bench.harness.report import report
from offbeat.testing import ThreadWorld

WORKERS, BATCH, CONTEXT, EVERY = 8, 4, 32, 10
OPTIMIZERS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "Adam": (torch.optim.Adam, (1e-3, 3e-3, 1e-2)),
    "LAMB": (Lamb, (3e-3, 1e-2, 3e-2)),
}
BENCH = Bench(
    name="adasum/large_batch",
    claim="Fewer steps with Adam and LAMB (Table 2)",
    minutes=3,
    full_minutes=8,
    evidence={"Table 2": "Fewer steps with Adam and with LAMB at a large batch"},
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def train(
    text: list[Tensor], method: str, workers: int, kind: str, lr: float, steps: int
) -> list[float]:
    """The held-out loss every ``EVERY`` steps; warmed up over a tenth, then constant."""
    torch.manual_seed(0)
    start = GPT(32, 2, 4, CONTEXT).state_dict()
    held = torch.randint(len(text[1]) - CONTEXT - 1, (256,))

    def worker(world: offbeat.World) -> list[float]:
        model = GPT(32, 2, 4, CONTEXT)
        model.load_state_dict(start)
        replica = offbeat.replicate(model, offbeat.algorithm(method), mesh=world)
        optimizer = OPTIMIZERS[kind][0](model.parameters(), lr=lr)
        random = torch.Generator().manual_seed(world.rank)
        losses = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / (steps / 10))
            starts = torch.randint(len(text[0]) - CONTEXT - 1, (BATCH,), generator=random)
            loss_of(model, text[0], starts, CONTEXT).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if (step + 1) % EVERY == 0 and world.rank == 0:
                with torch.no_grad():
                    losses.append(loss_of(model, text[1], held, CONTEXT).item())
        replica.finish()
        replica.detach()
        return losses

    losses = ThreadWorld(workers).run(worker, timeout=600)[0]
    console.print(f"{kind}, {method}, {workers} workers, lr {lr:g}: {losses[-1]:.3f}", style="dim")
    return losses


def steps_to(target: float, losses: list[float]) -> int | None:
    return next(((i + 1) * EVERY for i, loss in enumerate(losses) if loss <= target), None)


def shown(steps: int | None) -> str:
    return "never" if steps is None else f"{steps}"


@app.command(epilog=BENCH.examples("--steps 400 --full"))
def main(
    full: Annotated[bool, typer.Option("--full", help="Tune the learning rates too.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 250,
) -> None:
    """Train a GPT with eight workers, by all-reduce and by Adasum."""
    torch.set_num_threads(1)
    text = read_corpus()
    rows, claims, curves = [], [], {}
    for kind, (_, rates) in OPTIMIZERS.items():
        single = {lr: train(text, "alone", 1, kind, lr, steps) for lr in rates}
        base = min(rates, key=lambda lr: single[lr][-1])
        target = single[base][-1]
        curves[kind] = {"one worker": single}
        reached: dict[str, int | None] = {}
        for method in ("ddp", "adasum"):
            runs = {lr: train(text, method, WORKERS, kind, lr, steps)
                    for lr in (rates if full else (base,))}  # fmt: skip
            curves[kind][method] = runs
            reached[method] = steps_to(target, runs[base])
            best = min((s for s in (steps_to(target, r) for r in runs.values()) if s), default=None)
            tuned = shown(best) if full else ""
            rows.append((kind, method, f"{base:g}", shown(reached[method]), tuned,
                         f"{runs[base][-1]:.3f}"))  # fmt: skip
        ours, theirs = reached["adasum"], reached["ddp"]
        claims.append(
            Claim(f"{kind}: Adasum reaches the target in fewer steps than all-reduce",
                  "20 % to 30 % fewer" if kind == "LAMB" else "7039, all-reduce never",
                  f"{shown(ours)} against {shown(theirs)}, of {steps}",
                  ours is not None and (theirs is None or ours < theirs))
        )  # fmt: skip
    headings = ("optimizer", "method", "lr", "steps to target", "tuned", "loss at the end")
    title = f"GPT, {WORKERS} workers of {BATCH}, target: one worker after {steps} steps"
    report(BENCH, title, headings, rows, claims, raw=curves)


if __name__ == "__main__":
    app()
