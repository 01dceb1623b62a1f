"""Table 2 of the Adasum paper in small: steps to a target loss with Adam and with LAMB.

Eight virtual workers, threads of one process, train a small GPT on the standard library's sources.
Learning rates are searched for with one worker; all-reduce and Adasum then train with them on
eight times the batch, as they are. With --full all-reduce and Adasum are tuned too.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _claims import Claim, report
from pytorch_optimizer import Lamb
from rich.console import Console
from torch import Tensor

import offbeat
from offbeat.testing import ThreadWorld

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from char_gpt import GPT, loss_of, read_corpus

WORKERS, BATCH, CONTEXT, EVERY = 8, 4, 32, 10
OPTIMIZERS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "Adam": (torch.optim.Adam, (1e-3, 3e-3, 1e-2)),
    "LAMB": (Lamb, (3e-3, 1e-2, 3e-2)),
}
EPILOG = "Examples: `python bench/adasum_large_batch.py`, `... --steps 400 --full`"
app = typer.Typer(pretty_exceptions_enable=False)
console = Console(highlight=False)


def train(
    text: list[Tensor], method: str, workers: int, kind: str, lr: float, steps: int
) -> list[float]:
    """The held-out loss every ``EVERY`` steps; warmed up over a tenth, then constant."""
    torch.manual_seed(0)
    start = GPT(32, 2, 4, CONTEXT).state_dict()
    held = torch.randint(len(text[1]) - CONTEXT - 1, (256,))

    def worker(groups: offbeat.Groups) -> list[float]:
        model = GPT(32, 2, 4, CONTEXT)
        model.load_state_dict(start)
        replica = offbeat.replicate(model, offbeat.algorithm(method), mesh=groups)
        optimizer = OPTIMIZERS[kind][0](model.parameters(), lr=lr)
        random = torch.Generator().manual_seed(groups.rank)
        losses = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / (steps / 10))
            starts = torch.randint(len(text[0]) - CONTEXT - 1, (BATCH,), generator=random)
            loss_of(model, text[0], starts, CONTEXT).backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
            if (step + 1) % EVERY == 0 and groups.rank == 0:
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


def said(steps: int | None) -> str:
    return "never" if steps is None else f"{steps}"


@app.command(epilog=EPILOG)
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
            tuned = said(best) if full else ""
            rows.append((kind, method, f"{base:g}", said(reached[method]), tuned,
                         f"{runs[base][-1]:.3f}"))  # fmt: skip
        ours, theirs = reached["adasum"], reached["ddp"]
        claims.append(
            Claim(f"{kind}: Adasum needs fewer steps than all-reduce to what one worker reached",
                  "20 % to 30 % fewer" if kind == "LAMB" else "7039, all-reduce never",
                  f"{said(ours)} against {said(theirs)}, of {steps}",
                  ours is not None and (theirs is None or ours < theirs))
        )  # fmt: skip
    headings = ("optimizer", "method", "lr", "steps to target", "tuned", "loss at the end")
    title = f"GPT, {WORKERS} workers of {BATCH}, target: one worker after {steps} steps"
    report("adasum_large_batch", title, headings, rows, claims, curves=curves)


if __name__ == "__main__":
    app()
