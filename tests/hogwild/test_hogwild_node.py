"""Nodes whose workers share memory, and the exchange between them."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import offbeat
from offbeat.hogwild import NodeReplica
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World


def embedding(value: float) -> nn.Embedding:
    """Sparse, as workers want it."""
    model = nn.Embedding(3, 2, sparse=True).share_memory()
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def test_what_workers_do_during_an_exchange_stays() -> None:
    def train(world: World) -> float:
        model = embedding(0.0)
        node = NodeReplica(model, offbeat.local_sgd(every=1), mesh=world)
        model.weight.data.fill_(float(world.rank))
        exchange = node.replica.step

        def interrupted() -> None:
            exchange()
            model.weight.data.add_(10.0)  # a worker's update, meanwhile

        with patch.object(node.replica, "step", interrupted):
            node.step()
        value = model.weight.data[0, 0].item()
        node.detach()
        return value

    assert ThreadWorld(2).run(train) == [10.5, 10.5]


@pytest.mark.parametrize("recipe", ["sgp()", "local_sgd(every=3)"])
def test_nodes_start_alike_and_are_equal_after_finish(recipe: str) -> None:
    def train(world: World) -> tuple[float, float]:
        model = embedding(float(world.rank))
        node = NodeReplica(model, offbeat.algorithm(recipe), mesh=world)
        start = model.weight.data[0, 0].item()
        for _ in range(4):
            model.weight.data.add_(float(world.rank))
            node.step()
        node.finish()
        end = model.weight.data[0, 0].item()
        node.detach()
        return start, end

    # The mean of what the nodes' workers added: 4 x (0 + 1 + 2) / 3.
    assert ThreadWorld(3).run(train) == [(0.0, pytest.approx(4.0))] * 3


@pytest.mark.fault(
    "NodeReplica gets a gradient method or a model in private memory",
    "ValueError; names the parameters",
)
def test_gradient_methods_and_private_models_are_refused() -> None:
    with pytest.raises(ValueError, match="exchanges gradients, which stay with the workers"):
        NodeReplica(embedding(0.0), offbeat.ddp())
    for text in ("local_sgd(every=1) for 2 steps, then ddp", "auto"):
        with pytest.raises(ValueError, match="exchanges gradients, which stay with the workers"):
            NodeReplica(embedding(0.0), offbeat.algorithm(text))
    with pytest.raises(ValueError, match=r"\['weight'\] are not in shared memory"):
        NodeReplica(nn.Embedding(3, 2), offbeat.sgp())
