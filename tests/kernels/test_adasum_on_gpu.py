"""The Adasum passes of a GPU agree with those in torch, for all layers at once."""

import pytest
import torch

from offbeat.functional import Segment, add_gram, combine_rows
from triton_device import DEVICE, kernels_of

on_gpu = kernels_of("adasum")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LENGTHS = {"odd": (1, 3000, 2048, 7), "even": (2048, 5000)}


def layers_of(lengths: tuple[int, ...], gap: int) -> tuple[list[Segment], int]:
    """Segments of two layers in turns, the last one first, with gaps at the ends."""
    ends = [gap + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [Segment(i % 2, *ends[i : i + 2]) for i in reversed(range(len(lengths)))]
    return spans, ends[-1] + gap


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_both_ways_agree(dtype: torch.dtype, size: int, lengths: str) -> None:
    spans, numel = layers_of(LENGTHS[lengths], gap=3 if lengths == "odd" else 8)
    rows = torch.randn(size, numel).to(DEVICE, dtype)
    found, expected = (torch.ones(2, size, size, dtype=torch.float64) for _ in "ab")
    on_gpu.add_gram(rows, spans, found := found.to(DEVICE))
    add_gram(rows.cpu(), spans, expected)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-10)
    assert torch.equal(found, found.mT)
    weights = torch.randn(2, size, dtype=torch.float64).to(DEVICE)
    ours, theirs = (torch.full((numel,), 7.0, dtype=dtype, device=DEVICE) for _ in "ab")
    on_gpu.combine_rows(rows, spans, weights, ours)
    combine_rows(rows, spans, weights, theirs)
    torch.testing.assert_close(ours, theirs)
    assert ours[:3].tolist() == [7.0] * 3, "what no span covers stays"


def test_products_of_many_blocks_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "SUMS", 2)
    out = torch.zeros(1, 1, 1, dtype=torch.float64, device=DEVICE)
    on_gpu.add_gram(torch.ones(1, 5 * 2048 + 1).to(DEVICE), [Segment(0, 0, 5 * 2048 + 1)], out)
    assert out.item() == 5 * 2048 + 1


def test_a_row_may_be_overwritten_by_the_combination() -> None:
    rows = torch.randn(2, 4000).to(DEVICE)
    weights = torch.tensor([[0.5, 2.0]], dtype=torch.float64, device=DEVICE)
    expected = 0.5 * rows[0].double() + 2 * rows[1].double()
    on_gpu.combine_rows(rows, [Segment(0, 0, 4000)], weights, rows[1])
    assert torch.equal(rows[1], expected.float())


def test_sums_in_float64_neither_overflow_nor_lose_small_parts() -> None:
    rows = torch.full((2, 5000), 2.0**100)
    rows[1] = 2.0**-100
    out = torch.zeros(1, 2, 2, dtype=torch.float64, device=DEVICE)
    on_gpu.add_gram(rows.to(DEVICE), [Segment(0, 0, 5000)], out)
    assert out.tolist() == [[[5000 * 2.0**200, 5000.0], [5000.0, 5000 * 2.0**-200]]]


def test_what_is_not_finite_stays() -> None:
    rows = torch.ones(3, 5)
    rows[1, 2], rows[2, 4] = torch.nan, torch.inf
    out = torch.zeros(1, 3, 3, dtype=torch.float64, device=DEVICE)
    on_gpu.add_gram(rows.to(DEVICE), [Segment(0, 0, 5)], out)
    assert out[0].diagonal().isfinite().tolist() == [True, False, False]


def test_rows_with_gaps_are_left_to_torch() -> None:
    rows = torch.randn(2, 3, 2).to(DEVICE)[..., 0]
    out = torch.zeros(1, 2, 2, dtype=torch.float64, device=DEVICE)
    on_gpu.add_gram(rows, [Segment(0, 0, 3)], out)
    torch.testing.assert_close(out[0], rows.double() @ rows.double().T)
