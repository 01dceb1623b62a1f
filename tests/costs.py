"""What every recipe sends and holds, recorded, for the table in docs/methods/index.md.

``python tests/costs.py`` writes the table. Its first column says which recipes are recorded.
"""

import re
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD

import offbeat
from held import storages
from offbeat.plan.record import Recording, record
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

PAGE = Path(__file__).parent.parent / "docs" / "methods" / "index.md"
BLOCK = re.compile(r"(<!-- costs -->\n).*?(\n<!-- end -->)", re.DOTALL)
WIDTHS = (8, 64)  # ranks, each on a node of its own
LAYERS, ENTRIES = 10, 100_000
SIZE = 4 * LAYERS * ENTRIES


def sent(made: Recording) -> float:
    """What rank 0 sends in a step, in models, over the second half of a recording."""
    steps = made.sent[len(made.sent) // 2 :]
    return sum(sum(step.values()) for step in steps) / len(steps) / SIZE


def held(algorithm: offbeat.Algorithm, made: Recording) -> float:
    """What the exchanges of a rank hold beside the model, in models."""
    if algorithm.parameters is None:
        return _held_by_gradients(algorithm)
    return made.memory / SIZE


def table(page: str) -> str:
    """The table on ``page``, with the figures of the recipes in its first column."""
    found = BLOCK.search(page)
    assert found is not None
    head, line, *rows = found[0].splitlines()[2:-2]
    texts = [row.split("`")[1] for row in rows]
    made = [f"| `{text}` | {' | '.join(map(_figure, _costs(text)))} |" for text in texts]
    return "\n".join([head, line, *made])


def _costs(text: str) -> list[float]:
    algorithm = offbeat.algorithm(text)
    made = [_record(algorithm, ranks) for ranks in WIDTHS]
    return [*map(sent, made), held(algorithm, made[0])]


def _record(algorithm: offbeat.Algorithm, ranks: int) -> Recording:
    """Two periods of an algorithm."""
    parameters = {f"{layer}": torch.empty(ENTRIES, device="meta") for layer in range(LAYERS)}
    exchange = algorithm.parameters
    period = exchange.cycle.start.every if hasattr(exchange, "cycle") else 1
    period = getattr(exchange, "every", period)
    return record(algorithm, parameters, [[rank] for rank in range(ranks)], 2 * period)


def _figure(models: float) -> str:
    return f"{models:.3g}"


def _held_by_gradients(algorithm: offbeat.Algorithm) -> float:
    """Measured: exchanges of gradients do not declare their buckets."""
    start = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(LAYERS)))

    def worker(world: World) -> float:
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(LAYERS)))
        model.load_state_dict(start.state_dict())
        optimizer = SGD(model.parameters(), lr=0.01)
        replica = offbeat.replicate(model, algorithm, mesh=world, optimizer=optimizer)
        for _ in range(3):
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.step()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found = storages(replica.gradients)
        replica.detach()
        return sum(n for place, n in found.items() if place not in own) / (LAYERS * 40_000)

    return ThreadWorld(WIDTHS[0]).run(worker)[0]


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(BLOCK.sub(rf"\1\n{table(text)}\n\2", text), "utf-8")
