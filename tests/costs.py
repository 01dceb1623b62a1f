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
from offbeat.plan.record import record
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

PAGE = Path(__file__).parent.parent / "docs" / "methods" / "index.md"
BLOCK = re.compile(r"(<!-- costs -->\n).*?(\n<!-- end -->)", re.DOTALL)
WIDTHS = (8, 64)  # ranks, each on a node of its own
LAYERS, ENTRIES = 10, 100_000


def sent(text: str, ranks: int) -> float:
    """What rank 0 sends in a step, in models, over a whole period."""
    algorithm = offbeat.algorithm(text)
    period = max(_period(algorithm.gradients), _period(algorithm.parameters))
    made = record(algorithm, _parameters(), [[rank] for rank in range(ranks)], 2 * period)
    return sum(sum(step.values()) for step in made.sent[period:]) / period / _size()


def held(text: str, ranks: int) -> float:
    """What the exchanges of a rank hold beside the model, in models."""
    algorithm = offbeat.algorithm(text)
    if algorithm.parameters is None:
        return _held_by_gradients(algorithm, ranks)
    nodes = [[rank] for rank in range(ranks)]
    return record(algorithm, _parameters(), nodes, 2).memory / _size()


def table(page: str) -> str:
    """The table on ``page``, with the figures of the recipes in its first column."""
    found = BLOCK.search(page)
    assert found is not None
    head, line, *rows = found[0].splitlines()[2:-2]
    texts = [row.split("`")[1] for row in rows]
    made = [f"| `{text}` | {' | '.join(map(_figure, _costs(text)))} |" for text in texts]
    return "\n".join([head, line, *made])


def _costs(text: str) -> list[float]:
    return [*(sent(text, ranks) for ranks in WIDTHS), held(text, WIDTHS[0])]


def _figure(models: float) -> str:
    return f"{models:.3g}"


def _period(exchange: object) -> int:
    return int(getattr(exchange, "every", 0) or 4 * hasattr(exchange, "cycle") or 1)


def _parameters() -> dict[str, torch.Tensor]:
    return {f"{layer}": torch.empty(ENTRIES, device="meta") for layer in range(LAYERS)}


def _size() -> int:
    return 4 * LAYERS * ENTRIES


def _held_by_gradients(algorithm: offbeat.Algorithm, ranks: int) -> float:
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

    return ThreadWorld(ranks).run(worker)[0]


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(BLOCK.sub(rf"\1\n{table(text)}\n\2", text), "utf-8")
