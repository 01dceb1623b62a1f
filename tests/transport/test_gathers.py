"""All-gathers go to all members at once where these are few and it is little, else in a ring."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.platform.peers import MESHED
from offbeat.testing import ThreadWorld
from offbeat.transport import collectives
from offbeat.transport.collectives import AT_ONCE, all_gather
from offbeat.transport.links import Links
from offbeat.transport.messages import SHARE
from offbeat.transport.world import World

FEW, MANY = 3, MESHED + 2
MOST = AT_ONCE // (FEW - 1)  # bytes


@pytest.mark.parametrize(
    ("size", "nbytes", "dtype", "is_at_once"),
    [
        (FEW, 4, torch.float32, True),
        (FEW, MOST, torch.bfloat16, True),
        (FEW, MOST + 8, torch.float64, False),
        (MANY, 4, torch.float32, False),
    ],
)
def test_both_ways_gather_the_same(
    size: int, nbytes: int, dtype: torch.dtype, is_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, launch = set[int](), collectives.all_to_all_flat

    def counted(*given: Any) -> Any:
        ranks.add(threading.get_ident())
        return launch(*given)

    monkeypatch.setattr(collectives, "all_to_all_flat", counted)
    numel = nbytes // dtype.itemsize

    def work(world: World) -> tuple[Tensor, int]:
        links = Links.connect(world)
        group = links.open("world", peers=())
        assert group is not None
        out = torch.empty(size * numel, dtype=dtype)
        mine = out[world.rank * numel :][:numel].fill_(world.rank)  # a part of what it fills
        all_gather(out, mine, group).wait()
        links.close()
        return out, group.meter.bytes_sent["world"]

    expected = torch.arange(size).repeat_interleave(numel).to(dtype)
    for out, sent in ThreadWorld(size).run(work):
        assert torch.equal(out, expected)
        assert sent == (size - 1) * nbytes
    assert len(ranks) == (size if is_at_once else 0)


@pytest.mark.parametrize(
    ("size", "numel", "connections"),
    [(2, 1, 1), (FEW, 37, 1), (FEW, 37, 4), (FEW, SHARE, 4), (MANY, 1, 1), (MANY, 37, 1)],
)
def test_a_sum_at_once_is_that_of_an_all_reduce(size: int, numel: int, connections: int) -> None:
    def work(world: World) -> tuple[Tensor, int]:
        links = Links.connect(replace(world, connections=connections))
        group = links.open("world", peers=())
        assert group is not None
        tensor = torch.arange(numel, dtype=torch.float64) * 3.0**world.rank
        tensor[0] = -0.0  # which a sum that begins with 0 would change
        collectives.all_reduce_at_once(tensor, group)
        links.close()
        return tensor, group.meter.bytes_sent["world"]

    expected = torch.arange(numel, dtype=torch.float64) * (3.0**size - 1) / 2
    found = ThreadWorld(size).run(work)
    for tensor, sent in found:
        assert torch.equal(tensor, expected)
        assert torch.signbit(tensor[0])
        least = 2 * (size - 1) * 8 * numel // size
        assert least <= sent < least + 2 * 8 * size * 2 * connections  # parts are of equal size
