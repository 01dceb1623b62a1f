"""The selection of a GPU finds in every layer what torch.topk does, and of ties the first."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offbeat.kernels.dispatch import top_k_of_blocks
from triton_device import DEVICE, kernels_of

on_gpu = kernels_of("top_k")
LENGTHS = {"odd": (5000, 33, 1, 2048, 4097), "even": (4096, 2048 + 8, 8)}
DRAWS = {
    "normal": torch.randn,
    "coarse": lambda n: torch.randn(n).mul(4).round(),  # ties, and many zeros
    "sparse": lambda n: torch.randn(n) * (torch.rand(n) < 0.001),
    "zeros": torch.zeros,
    "equal": torch.ones,
    "tiny": lambda n: torch.randn(n) * 1e-41,
    "wide": lambda n: 10 ** (12 * torch.randn(n)),
}


def blocks_of(lengths: tuple[int, ...], density: float) -> list[tuple[int, int, int]]:
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [(i, j, max(1, int(density * (j - i)))) for i, j in pairwise(ends)]


def first_largest(x: Tensor, k: int) -> Tensor:
    """The k largest magnitudes; of equal ones those that come first."""
    return x.abs().sort(stable=True, descending=True).indices[:k].sort().values


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
@pytest.mark.parametrize("draw", DRAWS)
def test_the_largest_of_every_layer_are_found(draw: str, density: float, lengths: str) -> None:
    blocks = blocks_of(LENGTHS[lengths], density)
    x = DRAWS[draw](sum(LENGTHS[lengths]))
    found = on_gpu.top_k_of_blocks(x.to(DEVICE), blocks).cpu()
    for (start, stop, k), ours in zip(blocks, found.split([k for *_, k in blocks]), strict=True):
        theirs = first_largest(x[start:stop], k) + start
        assert torch.equal(ours.sort().values, theirs), (start, stop)


def test_what_is_not_finite_is_largest() -> None:
    x = torch.randn(5000)
    x[7], x[4000], x[4999] = torch.inf, torch.nan, -torch.inf
    assert on_gpu.top_k_of_blocks(x.to(DEVICE), [(0, 5000, 1)]).tolist() == [4000]
    assert sorted(on_gpu.top_k_of_blocks(x.to(DEVICE), [(0, 5000, 3)]).tolist()) == [7, 4000, 4999]


def test_layers_in_any_order_and_empty_ones() -> None:
    x = torch.arange(6000.0, device=DEVICE)
    found = on_gpu.top_k_of_blocks(x, [(3000, 6000, 2), (3000, 3000, 0), (0, 3000, 1)])
    assert found.tolist() == [5999, 5998, 2999]


def test_small_layers_and_other_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "top_k_of_blocks", None)
    select = top_k_of_blocks(torch.device("cuda"))
    for dtype, numel in ((torch.float32, 5000), (torch.float64, 2**16)):
        x = torch.arange(numel, dtype=dtype, device=DEVICE)
        found = select(x, [(0, 1000, 1), (1000, numel, 2)])
        assert sorted(found.tolist()) == [999, numel - 2, numel - 1]


def test_one_large_layer_is_selected_from_by_the_kernels() -> None:
    x = torch.randn(2**16)
    found = top_k_of_blocks(torch.device("cuda"))(x.to(DEVICE), [(0, len(x), 50)])
    assert torch.equal(found.cpu().sort().values, first_largest(x, 50))
