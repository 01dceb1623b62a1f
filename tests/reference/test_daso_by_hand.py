"""The reference of DASO against hand arithmetic and against methods that it contains."""

from typing import Any

import numpy as np
import pytest

from reference.adasum import bf16
from reference.daso import blocking, daso, eq_1, paces
from reference.local_sgd import local_sgd
from reference.participants import Array, Nodes

NODES: Nodes = ((0, 1), (2,))
SLOPES = np.array([[1.0], [3.0], [6.0]])  # constant gradients; the nodes' means are 2 and 6


def slope(rank: int, z: Array, k: int) -> Array:
    return np.asarray(SLOPES[rank])


def test_eq_1_by_hand() -> None:
    x, sent = np.array([[3.0], [5.0]]), np.array([[1.0], [2.0]])
    np.testing.assert_array_equal(eq_1(x, sent, 1), [[9 / 4], [13 / 4]])
    np.testing.assert_array_equal(eq_1(x, sent, 3), [[21 / 8], [33 / 8]])
    np.testing.assert_array_equal(eq_1(sent[:1], np.tile(sent[:1], (5, 1)), 2), sent[:1])


def test_a_sum_by_hand() -> None:
    """Sent after step 2 as (-2, -6) * 2, merged after step 4 with (-2, -6) * 4; lr 1."""
    z = daso(np.zeros(1), slope, nodes=NODES, steps=5, lr=1.0, every=2, wait=2)[:, :, 0]
    merged = np.array([(4 * -8 - 16) / 6, (4 * -24 - 16) / 6])
    np.testing.assert_allclose(z[3], [-6, -6, -18])
    np.testing.assert_allclose(z[4], [merged[0], merged[0], merged[1]])
    np.testing.assert_allclose(z[5], z[4] + [-2, -2, -6])


def test_blocking_alone_is_an_average_after_every_step() -> None:
    """And its rounding does not add up: what a cast took is sent later."""
    lone: Nodes = ((0,), (1,), (2,))
    shared: dict[str, Any] = {"nodes": lone, "steps": 200, "lr": 1e-3}
    exact = local_sgd(np.full(1, 100.0), slope, every=1, **shared)
    ours = daso(np.full(1, 100.0), slope, every=4, wait=1, warmup=200, **shared)
    np.testing.assert_allclose(ours, exact, rtol=1e-13)
    rounded = daso(np.full(1, 100.0), slope, every=4, wait=1, warmup=200, rounded=bf16, **shared)
    # The mean is rounded once more, by at most 2^-8 of an update of 3.4e-3, 200 times.
    np.testing.assert_allclose(rounded, exact, rtol=0, atol=200 * 3.4e-3 * 2**-8)


def test_what_a_cast_took_is_not_lost() -> None:
    x = np.random.default_rng(0).normal(size=(3, 50))
    r, e = np.zeros(50), np.full((3, 50), 1e-3)
    _, left = blocking(x, r, e, bf16)
    np.testing.assert_allclose(bf16(x + e) + left, x + e, rtol=1e-15)
    assert np.abs(left).max() <= 2**-8 * np.abs(x + e).max()


@pytest.mark.parametrize(
    ("patience", "expected"),
    [(0, [(4, 2), (2, 1), (1, 1), (4, 2), (4, 2)]), (1, [(4, 2), (4, 2), (2, 1), (2, 1), (1, 1)])],
)
def test_paces_by_hand(patience: int, expected: list[tuple[int, int]]) -> None:
    assert paces([1.0] * 5, 4, 2, patience) == expected


def test_a_sum_is_merged_before_the_cool_down_averages() -> None:
    z = daso(
        np.zeros(1),
        slope,
        nodes=NODES,
        steps=4,
        lr=1.0,
        every=2,
        wait=2,
        cooldown=1,
        total=4,
    )[:, :, 0]
    # Sent after step 2; step 4 is the first of the cool-down.
    merged = np.array([(4 * -8 - 16) / 6, (4 * -24 - 16) / 6])
    np.testing.assert_allclose(z[4], merged.mean())
