"""The mixing matrices and push-sum averaging against known answers."""

import numpy as np
import pytest

from reference.push_sum import Matrix, irregular, mix, one_peer_exponential, ring

CONTRACTION = {  # largest error of a unit impulse after 1, 2 and 4 cycles of ceil(log2 n) rounds
    3: [0.16667, 0.041667, 0.0026042],
    5: [0.075, 0.01875, 0.00068359],
    6: [0.083333, 0.020833, 0.00081380],
    7: [0.10714, 0.013393, 0.00020926],
    12: [0.041667, 0.010417, 0.00034587],
}


def impulse_error(matrix: Matrix, size: int, rounds: int) -> float:
    """Largest |z_i - 1/n| over all ranks i and all places of the unit impulse."""
    x, w = np.eye(size), np.ones(size)
    for index in range(rounds):
        x, w = mix(matrix(size, index), x, w)
    return float(np.abs(x / w[:, None] - 1 / size).max())


@pytest.mark.parametrize("size", CONTRACTION)
def test_one_peer_exponential_contracts_as_known(size: int) -> None:
    """To all five printed digits."""
    cycle = int(np.ceil(np.log2(size)))
    errors = [impulse_error(one_peer_exponential, size, n * cycle) for n in (1, 2, 4)]
    assert [float(f"{error:.5g}") for error in errors] == CONTRACTION[size]


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5])
def test_one_peer_exponential_is_exact_for_powers_of_two(rounds: int) -> None:
    """After log2 n rounds, not before, and from any place in the cycle."""
    assert impulse_error(one_peer_exponential, 2**rounds, rounds) == 0
    assert impulse_error(one_peer_exponential, 2**rounds, rounds - 1) > 0
    assert impulse_error(lambda n, i: one_peer_exponential(n, i + 3), 2**rounds, rounds) == 0


def test_matrices_entry_by_entry() -> None:
    """Column j is what rank j does with its mass."""
    h, t = 1 / 2, 1 / 3
    assert one_peer_exponential(3, 2).tolist() == [[h, 0, h], [h, h, 0], [0, h, h]]
    assert one_peer_exponential(3, 1).tolist() == [[h, h, 0], [0, h, h], [h, 0, h]]
    assert ring(4, 5).tolist() == [[t, t, 0, t], [t, t, t, 0], [0, t, t, t], [t, 0, t, t]]
    assert ring(2, 0).tolist() == one_peer_exponential(2, 7).tolist() == [[h, h], [h, h]]
    assert ring(1, 0).tolist() == one_peer_exponential(1, 3).tolist() == [[1]]
    assert irregular(4, 0).tolist() == [[t, 0, 0, h], [t, h, 0, 0], [t, h, h, 0], [0, 0, h, h]]


@pytest.mark.parametrize("matrix", [one_peer_exponential, ring, irregular])
def test_mass_is_constant(matrix: Matrix) -> None:
    """Sum of x and sum of w, round by round."""
    x, w = np.random.default_rng(0).normal(size=(7, 3)), np.linspace(0.5, 1.5, 7)
    mass_x, mass_w = x.sum(axis=0), w.sum()
    for index in range(20):
        x, w = mix(matrix(7, index), x, w)
        np.testing.assert_allclose(x.sum(axis=0), mass_x, rtol=0, atol=1e-14)
        np.testing.assert_allclose(w.sum(), mass_w, rtol=1e-14)


@pytest.mark.parametrize("matrix", [one_peer_exponential, ring])
def test_regular_graphs_keep_the_weights(matrix: Matrix) -> None:
    """Rows sum to 1 as well, so P 1 = 1."""
    for size in range(1, 14):
        for index in range(5):
            np.testing.assert_allclose(matrix(size, index).sum(axis=1), 1, rtol=1e-14)


def test_only_the_weight_makes_an_irregular_graph_exact() -> None:
    """x / w goes to the mean; x alone goes to another limit."""
    x, w = np.array([[1.0], [-2.0], [4.0], [9.0]]), np.ones(4)
    for index in range(200):
        x, w = mix(irregular(4, index), x, w)
    np.testing.assert_allclose(x / w[:, None], 3.0, rtol=1e-13)
    assert np.abs(x - 3.0).max() > 0.5
