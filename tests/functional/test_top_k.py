"""Selection, error feedback and the cost model, on tensors and numbers alone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.functional import (
    LinkCost,
    adaptive_ratio,
    count_kept,
    delta,
    extract,
    is_cheaper_dense,
    max_speedup,
    sampled_top_k,
    speedup,
    top_k,
    warm_density,
)
from offbeat.functional.top_k import BLOCK, LARGE, SMALL
from offbeat.kernels.dispatch import top_k_of_blocks
from offbeat.kernels.top_k import scanned_blocks

Select = Callable[[Tensor, int], Tensor]


def accelerated_top_k(x: Tensor, k: int) -> Tensor:
    """The way of tensors that are not on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(top_k.__globals__, "is_on_host", lambda _: False)
        return sampled_top_k(x, k)


def scanned_top_k(x: Tensor, k: int) -> Tensor:
    return scanned_blocks(x, [(0, len(x), k)])


every = pytest.mark.parametrize("select", [top_k, sampled_top_k, scanned_top_k, accelerated_top_k])


def noise(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def largest(x: Tensor, k: int) -> list[int]:
    """By sorting all of it."""
    return sorted(np.argsort(-np.abs(x.double().numpy()), kind="stable")[:k].tolist())


@every
@pytest.mark.parametrize(
    "numel", [1, 2 * BLOCK, 101, SMALL - 1, SMALL + 7, LARGE, LARGE + BLOCK - 1]
)
@pytest.mark.parametrize("density", [0.0001, 0.01, 1.0])
def test_selects_the_largest_magnitudes(select: Select, numel: int, density: float) -> None:
    x = noise(numel)
    k = count_kept(numel, density)
    assert sorted(select(x, k).tolist()) == largest(x, k)


@every
@given(
    numel=st.integers(1, 3 * LARGE // 2),
    share=st.floats(0, 1),
    zeros=st.floats(0, 1),
    levels=st.integers(1, 50),
    seed=st.integers(0, 100),
)
@settings(max_examples=30)
def test_selects_k_distinct_entries_whatever_ties(
    select: Select, numel: int, share: float, zeros: float, levels: int, seed: int
) -> None:
    """Few different values and many zeros: which of tied entries is free, their values are not."""
    x = (noise(numel, seed) * levels).round()
    x[: int(zeros * numel)] = 0
    k = count_kept(numel, share**4)
    chosen = select(x, k)
    assert chosen.dtype == torch.int64
    assert len(set(chosen.tolist())) == k
    expected = x.abs().sort(descending=True).values[:k]
    assert torch.equal(x[chosen].abs().sort(descending=True).values, expected)


@given(
    sizes=st.lists(st.integers(1, 700) | st.just(64), min_size=1, max_size=12),
    levels=st.integers(0, 50),
    broken=st.sampled_from([None, float("nan"), float("inf")]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60)
def test_machine_code_selects_in_all_blocks_what_torch_does(
    sizes: list[int], levels: int, broken: float | None, dtype: torch.dtype, seed: int
) -> None:
    """Blocks of any length side by side, k up to all of one; ties in value, zeros, NaN."""
    x = (noise(sum(sizes), seed) * levels).round().to(dtype)
    if broken is not None:
        x[seed % x.numel()] = broken
    ends = np.cumsum(sizes).tolist()
    ks = [1 + seed * 7 % size for size in sizes]  # equal for equal sizes: runs of blocks
    blocks = [(end - size, end, k) for end, size, k in zip(ends, sizes, ks, strict=True)]
    machine = top_k_of_blocks(torch.device("cpu"))(x, blocks)
    assert machine.unique().numel() == sum(ks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.kernels.dispatch.find_spec", lambda _: None)
        plain = top_k_of_blocks(torch.device("cpu"), exact=True)(x, blocks)
    for mine, other in zip(machine.split(ks), plain.split(ks), strict=True):
        values = (x[chosen].abs().sort().values for chosen in (mine, other))
        torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)


@every
@pytest.mark.parametrize(
    ("where", "value"),  # the last one behind the last whole block
    [(0, float("nan")), (777, float("-inf")), (LARGE + 3, float("inf"))],
)
def test_what_is_not_finite_is_selected_first(select: Select, where: int, value: float) -> None:
    x = noise(LARGE + 5)
    x[where] = value
    for k in (1, 100):
        assert where in select(x, k).tolist()


@every
def test_a_layer_whose_large_entries_sit_together(select: Select) -> None:
    """A sample of every 101st entry misses them, or finds nothing else."""
    for stride in (1, 101):
        x = noise(2 * LARGE) * 1e-3
        x[7 : 7 + 100 * stride : stride] = 5.0
        assert sorted(select(x, 100).tolist()) == list(range(7, 7 + 100 * stride, stride))
    assert len(set(select(torch.zeros(2 * LARGE), 9).tolist())) == 9


@every
@pytest.mark.parametrize("rows", [1, 20, 600])
def test_an_embedding_of_which_few_rows_have_a_gradient(select: Select, rows: int) -> None:
    """Fewer entries than are sent, fewer blocks, and more than enough of both."""
    x, k = torch.zeros(LARGE // 128, 128), 1000
    x[:rows] = noise(128 * rows).view(rows, 128)
    chosen = select(x.view(-1), k)
    assert chosen.unique().numel() == k
    expected = x.view(-1).abs().sort(descending=True).values[:k]
    assert torch.equal(x.view(-1)[chosen].abs().sort(descending=True).values, expected)


def test_what_is_sent_and_what_is_left_add_up() -> None:
    x = noise(1000).double()
    acc = x.clone()
    indices = top_k(acc, 10)
    sent = torch.zeros_like(x).index_copy_(0, indices, extract(acc, indices))
    assert torch.equal(acc + sent, x)
    assert int((sent != 0).sum()) == 10
    # |x - TopK(x, k)|^2 <= (1 - k/d) |x|^2
    assert acc.square().sum() <= (1 - 10 / 1000) * x.square().sum()


def test_delta_is_at_most_one_for_a_single_worker_and_can_be_two_for_two() -> None:
    for seed in range(20):
        x = noise(100, seed)
        left = x.clone()
        extract(left, top_k(left, 7))
        assert 0 < delta(x, left, 7) <= 1
    rows = torch.tensor([[10.0, 1.0], [-10.0, 1.0]])
    left = rows.clone()
    for row in left:
        extract(row, top_k(row, 1))
    assert delta(rows.sum(0), left.sum(0), 1) == 2
    assert delta(torch.zeros(3), torch.zeros(3), 1) == 0


def test_kept() -> None:
    assert [count_kept(d, 0.001) for d in (0, 1, 999, 1000, 12_345)] == [0, 1, 1, 1, 12]
    assert count_kept(7, 1.0) == 7


@given(
    numel=st.integers(1, 10**8),
    compute=st.floats(0, 1),
    select=st.floats(0, 0.1),
    latency=st.floats(0, 0.01),
    per_byte=st.floats(1e-12, 1e-6),
    size=st.integers(2, 64),
)
def test_the_adaptive_ratio_is_the_smallest_that_fits(
    numel: int, compute: float, select: float, latency: float, per_byte: float, size: int
) -> None:
    wire = LinkCost(size, latency, per_byte)
    ratio = adaptive_ratio(numel, wire, compute=compute, select=select, limit=1000)

    def fits(ratio: float) -> bool:
        return wire.all_gather(numel * 8 / ratio) + select <= compute

    assert 1 <= ratio <= 1000
    if 1 < ratio < 1000:
        assert fits(ratio * (1 + 1e-9))
        assert not fits(ratio * (1 - 1e-6))
    elif ratio == 1000:
        assert not fits(999)
    else:
        assert fits(1 + 1e-9) or wire.all_reduce(numel * 4) <= compute


def test_break_even_is_at_as_many_ranks_as_there_are_for_float32() -> None:
    for size in (2, 4, 16):
        numel = 1000 * size
        assert is_cheaper_dense(numel, 1000, 4, size)
        assert not is_cheaper_dense(numel, 999, 4, size)
        # 16-bit gradients, sent as float32 with an index: twice that.
        assert is_cheaper_dense(numel, 500, 4, size, grad_itemsize=2)
    assert is_cheaper_dense(1, 1, 4, 2)
    assert is_cheaper_dense(0, 0, 4, 2)


def test_the_bound_of_the_speedup() -> None:
    """The closed form of eq. 19, and 1 + tb / (tf + tb) where r = 1."""
    for forward, backward, exchange in [(1.0, 2.0, 3.0), (0.3, 2.0, 0.5), (0.7, 1.5, 1.5)]:
        r = exchange / backward
        closed = 1 + 1 / (forward / min(exchange, backward) + max(r, 1 / r))
        assert max_speedup(forward, backward, exchange) == pytest.approx(closed, rel=1e-12)
    assert max_speedup(0.7, 1.5, 1.5) == pytest.approx(1 + 1.5 / 2.2)
    assert max_speedup(1.0, 1.0, 0.0) == speedup(1.0, 1.0, 1.0, 0.0) == 1.0


def test_a_wire_is_fitted_from_measurements() -> None:
    wire = LinkCost(5, 2e-4, 1e-8)
    again = LinkCost.fit(5, [(n, wire.all_gather(n)) for n in (100_000, 1000)])
    assert again.latency == pytest.approx(wire.latency)
    assert again.per_byte == pytest.approx(wire.per_byte)
    # A large message that was faster than a small one: noise, not a wire that gives time back.
    assert LinkCost.fit(5, [(1000, 2e-3), (9000, 1e-3)]) == LinkCost(5, 2e-3, 0.0)


@given(st.floats(1e-5, 1.0), st.integers(1, 100))
def test_warm_up_ends_at_the_density(density: float, warmup: int) -> None:
    densities = [warm_density(density, step, warmup) for step in range(warmup + 2)]
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] == densities[-2] == density
    assert densities[0] == max(density, 0.25)
