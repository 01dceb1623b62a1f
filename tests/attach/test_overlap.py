"""Which parameters share memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_map

import offbeat
from offbeat.attach.overlap import overlap
from offbeat.testing import ThreadWorld
from offbeat.transport.world import World

WEIGHT, FLAT = torch.zeros(6, 9), torch.zeros(8, dtype=torch.bfloat16)
CASES: dict[str, tuple[list[Tensor], bool]] = {
    "columns of a fused weight": ([WEIGHT[:, :3], WEIGHT[:, 3:6], WEIGHT[:, 6:]], False),
    "columns that overlap": ([WEIGHT[:, :4], WEIGHT[:, 3:6]], True),
    "a transposed view": ([WEIGHT, WEIGHT.t()], True),
    "two dtypes in turns": ([FLAT[::4], FLAT.view(torch.float32)[1::2]], False),
    "two dtypes in one place": ([FLAT[::2], FLAT.view(torch.float32)[1::2]], True),
    "empty tensors": ([FLAT[:0], FLAT[:0]], False),
}


@pytest.mark.parametrize("case", CASES)
def test_views_share_a_byte_or_none(case: str) -> None:
    tensors, shares = CASES[case]
    assert bool(overlap(dict(zip("abc", tensors, strict=False)))) == shares


def test_a_pair_inside_the_exception_is_none() -> None:
    tensors = {"a": WEIGHT, "b": WEIGHT.t(), "c": WEIGHT[5:]}
    assert overlap(tensors, but={"a", "b", "c"}) is None
    assert overlap(tensors, but={"a", "b"}) in {("a", "c"), ("b", "c")}


class Wrapper(Tensor):
    """Holds another tensor and has no memory of its own, as quantized weights do."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapper":
        about = {"dtype": held.dtype, "device": held.device, "strides": held.stride()}
        return Tensor._make_wrapper_subclass(cls, held.shape, **about)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda x: x.held if isinstance(x, cls) else x, (args, kwargs or {}))
        out = f(*bare[0], **bare[1])
        return cls(out) if f is torch.ops.aten.detach.default else out


def test_frozen_weights_without_an_address_beside_an_adapter() -> None:
    def work(world: World) -> Tensor:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        for layer in model[:2]:
            layer.weight = nn.Parameter(Wrapper(torch.ones(4, 4)), requires_grad=False)
        replica = offbeat.replicate(model, offbeat.ddp(), mesh=world)
        optimizer = SGD(model[2].parameters(), lr=0.1)
        model[2](torch.full((4,), float(world.rank))).sum().backward()
        optimizer.step()
        replica.step()
        replica.detach()
        return model[2].weight

    first, other = ThreadWorld(2).run(work)
    assert torch.equal(first, other)
