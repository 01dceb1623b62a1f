"""Short runs of every recipe, and the file of what they saved, ended with and sent.

``python tests/golden/record.py`` adds the recipes that the file does not have. What it has stays:
checkpoints that were written must load for as long as their format is supported.
"""

import copy
import gzip
import io
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import SGD

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World
from problems import Quadratic, loss
from recipe_cases import CASES, Case

FILE = Path(__file__).with_name("runs.pt.gz")
SAVED_AT, STEPS, SIZE = 7, 12, 4
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}
# Under 16-bit parameters only what rounding leaves behind differs.
ROUNDED = ("local_sgd(every=3)", "sgp(overlap=1)", "diloco(every=3)", "daso(every=2)")


class Run(NamedTuple):
    """What a rank saved in the middle of a run, its parameters at the end, and the bytes sent."""

    saved: dict[str, Any]
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    bytes_sent: int


def cases() -> list[tuple[Case, str]]:
    """The recipes whose runs can be repeated, by the dtype of the parameters."""
    repeatable = [case for case in CASES if case.reference]
    return [(c, d) for d in DTYPES for c in repeatable if d == "float64" or c.text in ROUNDED]


def run(case: Case, dtype: str, before: list[Run] | None = None) -> list[Run]:
    """Train from the start, or from what each rank has saved."""

    def worker(world: World) -> Run:
        model = Quadratic(DTYPES[dtype])
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = offbeat.replicate(model, case.algorithm, mesh=world)
        first = 0
        if before is not None:
            first = SAVED_AT
            model.load_state_dict(before[world.rank].model)
            replica.load_state_dict(before[world.rank].saved)
            optimizer.load_state_dict(before[world.rank].optimizer)
        saved: tuple[Any, ...] = ()
        for step in range(first, STEPS + 1):
            if step == SAVED_AT:
                parts = replica, model, optimizer
                saved = tuple(copy.deepcopy(part.state_dict()) for part in parts)
            if step < STEPS:
                loss(model, world.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                replica.step()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        replica.finish()  # what is in flight is counted when it is sent
        sent = replica.stats()["total"]["bytes_sent"]
        replica.detach()
        return Run(*saved, parameters, sent)

    return ThreadWorld(nodes=case.nodes(SIZE)).run(worker)


def recorded() -> dict[str, list[Run]]:
    """The runs in the file, by recipe and dtype."""
    if not FILE.exists():
        return {}
    content = torch.load(io.BytesIO(gzip.decompress(FILE.read_bytes())))
    return {name: [Run(*rank) for rank in runs] for name, runs in content.items()}


def key(case: Case, dtype: str) -> str:
    """The name of a run in the file."""
    return f"{case.text} in {dtype}"


if __name__ == "__main__":
    known = {name: [list(rank) for rank in runs] for name, runs in recorded().items()}
    for case, dtype in cases():
        if key(case, dtype) not in known:
            print(key(case, dtype))
            known[key(case, dtype)] = [list(rank) for rank in run(case, dtype)]
    buffer = io.BytesIO()
    torch.save(known, buffer)
    FILE.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    print(f"{len(known)} runs, {FILE.stat().st_size} bytes")
