"""The compiled Adasum passes agree with those in torch."""

import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llvmlite.binding import FeatureMap

from offbeat.functional import Segment, add_gram, analyze, combine_rows
from offbeat.functional.adasum import gram_tree
from offbeat.kernels import adasum
from offbeat.kernels.dispatch import machine_code

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    size=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 600), max_size=4),
    seed=st.integers(0, 2**16),
)
def test_both_ways_agree(dtype: torch.dtype, size: int, lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    ends = [3 + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    spans = [Segment(i, *ends[i : i + 2]) for i in reversed(range(len(lengths)))]
    rows = torch.randn(size, ends[-1] + 2).to(dtype)
    weights = torch.randn(len(lengths), size, dtype=torch.float64)
    out = torch.float64 if dtype == torch.float64 else torch.float32
    found, expected = (torch.ones(len(lengths), size, size, dtype=torch.float64) for _ in "ab")
    combined, reference = (torch.full((ends[-1] + 2,), 7.0, dtype=out) for _ in "ab")
    adasum.add_gram(rows, spans, found)
    add_gram(rows, spans, expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
    assert torch.equal(found, found.mT)
    adasum.combine_rows(rows, spans, weights, combined)
    combine_rows(rows, spans, weights, reference)
    torch.testing.assert_close(combined, reference)
    assert combined[:3].tolist() == [7.0] * 3, "what no span covers stays"


def test_every_float16_is_read_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adasum, "torch_gram", None)  # it is not called
    monkeypatch.setattr(adasum, "torch_combine", None)
    rows = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)[None]
    out, one = torch.zeros(2**16), torch.ones(1, 1, dtype=torch.float64)
    adasum.combine_rows(rows, [Segment(0, 0, 2**16)], one, out)
    assert torch.equal(out.nan_to_num(7, 8, 9), rows[0].float().nan_to_num(7, 8, 9))
    adasum.add_gram(rows, [Segment(0, 0, 2**16)], gram := torch.zeros(1, 1, 1, dtype=torch.float64))
    assert not gram.isfinite()


@given(size=st.integers(1, 9), layers=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_both_ways_judge_alike(size: int, layers: int, seed: int) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(layers, size, 20, dtype=torch.float64)
    rows[torch.rand(layers, size) < 0.2] = 0
    if size > 1:
        rows[0, 1] = -rows[0, 0]
    products = rows @ rows.mT
    found, expected = adasum.analyze(products), analyze(products)
    assert torch.equal(found.cancelled, expected.cancelled)
    for ours, theirs in zip(found, expected, strict=True):
        kept = ~found.cancelled  # of the others nothing is known
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-12, atol=1e-12, equal_nan=True)


def test_the_kernel_compiles_the_function_that_torch_runs() -> None:
    assert adasum._gram_tree.py_func is gram_tree


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays(dtype: torch.dtype) -> None:
    rows = torch.ones(3, 5, dtype=dtype)
    rows[1, 2], rows[2, 4] = torch.nan, torch.inf
    out = torch.zeros(1, 3, 3, dtype=torch.float64)
    adasum.add_gram(rows, [Segment(0, 0, 5)], out)
    assert out[0].diagonal().isfinite().tolist() == [True, False, False]


def test_without_numba_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("offbeat.kernels.dispatch")
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert machine_code.__wrapped__(torch.device("cpu")) == ""


def test_processors_of_one_name_may_make_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine_code.__wrapped__(torch.device("cpu"))
    hidden = FeatureMap({"avx2": False})
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: hidden)
    assert machine_code.__wrapped__(torch.device("cpu")) != here
