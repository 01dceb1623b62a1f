"""BatchNorm over the ranks of a node: torch's own layer, in the right group."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

import offbeat
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

NODES = ((0, 1), (2, 3))


def world(nodes: Any = NODES) -> World:
    return World(2, nodes, HashStore(), None)


def model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3, device=device), nn.BatchNorm1d(3, device=device))


def test_layers_are_synchronized_inside_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, mine = [], object()

    def subgroups(nodes: list[list[int]]) -> tuple[object, list[object]]:
        asked.append(nodes)
        return mine, [object(), mine]

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", subgroups)
    before = model("meta")  # which is no CPU
    weight = before[1].weight
    after = offbeat.sync_batch_norm(before, world())
    assert asked == [[[0, 1], [2, 3]]]
    assert isinstance(after[1], nn.SyncBatchNorm)
    assert after[1].process_group is mine
    assert after[1].weight is weight


def test_on_a_cpu_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm works on GPUs only; move the model"):
        offbeat.sync_batch_norm(model("cpu"), world())


def test_nothing_to_synchronize() -> None:
    linear = nn.Linear(2, 2)
    assert offbeat.sync_batch_norm(linear, world()) is linear
    alone = model("cpu")
    assert offbeat.sync_batch_norm(alone, world(((0,), (1,), (2,)))) is alone
    assert type(alone[1]) is torch.nn.BatchNorm1d


def test_a_cache_of_a_length_of_its_own_is_left_to_its_rank() -> None:
    """As those of rotary embeddings, which grow with the longest sequence that a rank has seen."""

    def worker(world: World) -> tuple[list[int], float]:
        model = nn.Linear(2, 1)
        model.register_buffer("cache", torch.zeros(1), persistent=False)
        model.register_buffer("mean", torch.zeros(1))
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        model.register_buffer("cache", torch.full((3 + world.rank,), 1.0), persistent=False)
        model.mean.fill_(world.rank)
        with replica.consensus():
            pass
        replica.finish()
        return list(model.cache.shape), model.mean.item()

    assert ThreadWorld(2).run(worker) == [([3], 0.5), ([4], 0.5)]
