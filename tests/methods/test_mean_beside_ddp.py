"""``ddp()`` beside torch's DistributedDataParallel, on the same model and data."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.platform.process_group import attach_torch_ddp
from offbeat.testing import ThreadWorld
from offbeat.transport.links import Links
from offbeat.transport.world import World

BUCKET_MB = 0.05  # several buckets


def net() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(nn.Linear(90, 90) for _ in range(4)))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 9)
    return model


def gradients(model: nn.Module, rank: int, step: Callable[[], Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(3):
        model(torch.randn(8, 90, generator=generator)).square().mean().backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        step()
    return seen


def ours(world: World) -> list[Tensor]:
    model = net()
    replica = offbeat.replicate(model, offbeat.ddp(bucket_mb=BUCKET_MB), mesh=world)
    seen = gradients(model, world.rank, replica.step)
    replica.detach()
    return seen


def theirs(world: World) -> list[Tensor]:
    links = Links.connect(world)
    group = links.open("world")
    assert group is not None
    given: Any = {"process_group": group.process_group, "bucket_cap_mb": BUCKET_MB}
    seen = gradients(DistributedDataParallel(net(), **given), world.rank, lambda: None)
    links.close()
    return seen


@pytest.mark.parametrize(("size", "tolerance"), [(2, 0.0), (4, 4 * torch.finfo().eps)])
def test_gradients_equal_those_of_torch(size: int, tolerance: float) -> None:
    """Bit for bit if two are summed; the order of more differs with the sizes of the buckets."""
    world = ThreadWorld(size)
    for mine, other in zip(world.run(ours), world.run(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


@pytest.fixture
def alone() -> Iterator[None]:
    """A default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_no_wrapper_of_torch_active(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later calls of torch.compile would split their graphs by its buckets."""
    model = net()
    remove = attach_torch_ddp(model, model.parameters(), BUCKET_MB)
    monkeypatch.setattr(model, "forward", Mock(side_effect=error))
    with pytest.raises(error):
        model(torch.zeros(1, 90))
    if error is KeyboardInterrupt:
        remove()
    assert DistributedDataParallel._active_ddp_module is None
