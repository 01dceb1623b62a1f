"""Several replicas in one process, which ranks use in different orders."""

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is taken for crossed after 4 s, and not after 15."""
    for name, seconds in {"BEAT": 0.25, "SILENT_AFTER": 4.0}.items():
        monkeypatch.setattr(f"offbeat.liveness.heartbeats.heartbeat.{name}", seconds)


class PartlyUsed(nn.Module):
    """Has a layer without gradients: an exchange is complete at the end of backward only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def errors(work: object) -> list[str]:
    def worker(world: World) -> str:
        models = PartlyUsed(), PartlyUsed()
        replicas = [offbeat.replicate(m, offbeat.ddp(), mesh=world) for m in models]
        with pytest.raises(ValueError, match="over all replicas of a process") as raised:
            work(models, replicas, world.rank)
        return str(raised.value)

    return ThreadWorld(2).run(worker)


@pytest.mark.fault(
    "ranks call two replicas of one process in different orders",
    "ValueError on all ranks after 15 s; names both calls and replicas",
)
def test_calls_in_different_orders() -> None:
    def work(models: object, replicas: list[offbeat.Replica], rank: int) -> None:
        for replica in replicas if rank == 0 else replicas[::-1]:
            replica.finish()

    texts = errors(work)
    assert texts[0] == texts[1]
    assert "waits in finish (call 0) of replica" in texts[0]


@pytest.mark.fault(
    "a backward exchanges through two replicas in different orders",
    "ValueError on all ranks after 15 s, if the ranks wait for each other; names both replicas",
)
def test_backwards_in_different_orders() -> None:
    def work(models: list[nn.Module], replicas: object, rank: int) -> None:
        losses = [model(torch.ones(2)).sum() for model in (models if rank == 0 else models[::-1])]
        sum(losses).backward()

    texts = errors(work)
    assert texts[0] == texts[1]
    assert "rank 0 waits in backward (call 0) of replica" in texts[0]
