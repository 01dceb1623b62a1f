"""The Adasum operator: known answers, invariants, the range of dtypes, the float64 reference."""

import importlib

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.functional import (
    Segment,
    adasum,
    add_gram,
    coefficients,
    combine_rows,
    orthogonality,
    tree,
)
from reference.adasum import combine as reference
from reference.test_adasum import KNOWN

RANGE = {torch.float32: 1e15, torch.float64: 1e100}  # of magnitudes without loss


def through_gram(rows: Tensor) -> Tensor:
    """One layer through its inner products, as it goes over the wire."""
    spans = [Segment(0, 0, rows.shape[1])]
    products = torch.zeros(1, len(rows), len(rows), dtype=torch.float64)
    add_gram(rows, spans, products)
    weights, _ = coefficients(products)
    out = torch.empty_like(rows[0])
    combine_rows(rows, spans, weights, out)
    return out


BOTH = pytest.mark.parametrize("operator", [tree, through_gram])


@BOTH
@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(operator: object, name: str) -> None:
    vectors, expected = KNOWN[name]
    found = operator(torch.tensor(vectors, dtype=torch.float64))  # type: ignore[operator]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_follows_the_reference(operator: object, size: int, dtype: torch.dtype) -> None:
    rows = torch.randn(size, 50, dtype=dtype, generator=torch.Generator().manual_seed(size))
    found = operator(rows).double().numpy()  # type: ignore[operator]
    expected = reference(rows.double().numpy())
    tolerance = 1e-12 if dtype == torch.float64 else 100 * torch.finfo(dtype).eps
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", RANGE)
def test_orthogonal_to_sum_and_parallel_to_mean(
    operator: object, size: int, dtype: torch.dtype
) -> None:
    """For vectors of very different lengths, at both ends of the range."""
    eps = torch.finfo(dtype).eps
    basis = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64)).Q[:size]
    for scale in (1 / RANGE[dtype], 1e-3, 1.0, RANGE[dtype]):
        lengths = scale * 3.0 ** -torch.arange(size, dtype=torch.float64)
        apart = (lengths[:, None] * torch.eye(size, 20, dtype=torch.float64)).to(dtype)
        np.testing.assert_array_equal(operator(apart), apart.sum(0))  # type: ignore[operator]
        aligned = (lengths[:, None] * basis[0].to(dtype)).to(dtype)
        found = operator(aligned).double()  # type: ignore[operator]
        mean = aligned.double().mean(0)
        assert (found - mean).norm() <= 100 * eps * mean.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 40).to(dtype)
    exact = tree(rows.double())
    np.testing.assert_array_equal(through_gram(rows).float(), exact.to(dtype).float())


def test_invariants_of_a_pair() -> None:
    """Symmetric, homogeneous, indifferent to rotations, never longer than orthogonal parts."""
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    for _ in range(20):
        a, b = torch.randn(2, 6, dtype=torch.float64)
        both = adasum(a, b)
        torch.testing.assert_close(adasum(b, a), both)
        torch.testing.assert_close(adasum(-2.5 * a, -2.5 * b), -2.5 * both)
        torch.testing.assert_close(adasum(rotation @ a, rotation @ b), rotation @ both)
        assert both @ both <= (a @ a + b @ b) * (1 + 1e-15)


def test_mean_over_independent_draws_keeps_the_direction() -> None:
    """E[AS(g1, g2)] = (2 I - M) E[g] with M = E[g g^T / |g|^2], within acos(0.94281) of E[g]."""
    random = np.random.default_rng(1)
    draws = random.normal(size=(12, 3)) + random.normal(size=3)
    pairs = [adasum(torch.tensor(a), torch.tensor(b)).numpy() for a in draws for b in draws]
    found, mean = np.mean(pairs, axis=0), draws.mean(0)
    projections = [np.outer(g, g) / (g @ g) for g in draws]
    expected = (2 * np.eye(3) - np.mean(projections, axis=0)) @ mean
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    cosine = found @ mean / np.linalg.norm(found) / np.linalg.norm(mean)
    c = np.linspace(0, 1, 100001)
    smallest = ((2 - c**2) / np.sqrt(4 - 3 * c**2)).min()
    assert abs(smallest - 0.94281) < 1e-5
    assert cosine > smallest


@BOTH
def test_a_zero_vector_passes_the_others_through(operator: object) -> None:
    rows = torch.randn(4, 9)
    rows[1] = 0
    rows[3] = 0
    expected = adasum(rows[0], rows[2], (2, 2))
    torch.testing.assert_close(operator(rows).float(), expected)  # type: ignore[operator]
    assert not operator(torch.zeros(3, 4)).any()  # type: ignore[operator]


def test_cancellation_is_noticed_where_digits_are_lost() -> None:
    a = torch.randn(30, dtype=torch.float64)
    third = torch.randn(30, dtype=torch.float64)
    spans = [Segment(0, 0, 30)]
    for gap, expected in ((1e-5, True), (0.0, True), (1e-2, False)):
        rows = torch.stack([a, -a + gap * torch.randn(30, dtype=torch.float64), third])
        products = torch.zeros(1, 3, 3, dtype=torch.float64)
        add_gram(rows, spans, products)
        assert coefficients(products)[1].tolist() == [expected], gap
    # Two ranks alone: what cancels is the result itself, and nothing is divided by it.
    products = torch.zeros(1, 2, 2, dtype=torch.float64)
    add_gram(torch.stack([a, -a]), spans, products)
    assert coefficients(products)[1].tolist() == [False]


def test_a_nan_stays() -> None:
    rows = torch.randn(4, 9)
    rows[2, 3] = torch.nan
    products = torch.zeros(2, 4, 4, dtype=torch.float64)
    add_gram(rows, [Segment(0, 0, 3), Segment(1, 3, 9)], products)
    weights, _ = coefficients(products)
    assert weights.isfinite().all(1).tolist() == [True, False]
    assert products.diagonal(dim1=1, dim2=2).isfinite()[1].tolist() == [True, True, False, True]


def test_orthogonality_is_one_for_orthogonal_and_one_over_p_for_equal_rows() -> None:
    for size in (2, 3, 4, 7):
        for rows, expected in ((torch.eye(size), 1.0), (torch.ones(size, size), 1 / size)):
            products = (rows @ rows.T).double()[None]
            measure = orthogonality(products, coefficients(products)[0])
            np.testing.assert_allclose(measure, [expected], rtol=1e-12)


def test_blocks_and_spans_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(3, 100, dtype=torch.float64)
    whole = torch.zeros(1, 3, 3, dtype=torch.float64)
    parts = torch.zeros(1, 3, 3, dtype=torch.float64)
    add_gram(rows, [Segment(0, 0, 100)], whole)
    module = importlib.import_module("offbeat.functional.adasum")
    monkeypatch.setattr(module, "BLOCK", 7)
    add_gram(rows, [Segment(0, 60, 100), Segment(0, 0, 60)], parts)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("size", [3, 4])
def test_compiles_as_one_graph(size: int) -> None:
    rows = torch.randn(size, 20, dtype=torch.float64)
    compiled = torch.compile(tree, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(rows), tree(rows))
    products = (rows @ rows.T)[None]
    compiled = torch.compile(coefficients, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(products)[0], coefficients(products)[0])
