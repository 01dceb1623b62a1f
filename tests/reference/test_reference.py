"""The reference methods against known answers, each other and hand arithmetic."""

import numpy as np
import pytest

from reference.ddp import ddp
from reference.local_sgd import local_sgd
from reference.participants import Array, Nodes
from reference.push_sum import Matrix, irregular, one_peer_exponential, ring, sgp

LONE: Nodes = ((0,), (1,), (2,), (3,))
UNEQUAL: Nodes = ((0, 3), (2,), (1,))  # unequal nodes, not in the order of ranks
START = np.array([1.0, -2.0])
TARGETS = np.array([[1.0, 0.0], [0.0, 3.0], [-1.0, 2.0], [4.0, -5.0]])


def pull(rank: int, z: Array, k: int) -> Array:
    """Nonlinear in z, different on every rank and step."""
    gradient: Array = np.tanh(z - TARGETS[rank]) + np.sin(k + rank)
    return gradient


def slope(rank: int, z: Array, k: int) -> Array:
    """Constant: the target of the rank."""
    return TARGETS[rank, :]


def uniform(size: int, index: int) -> Array:
    """Every entry of P equal to 1/n."""
    return np.full((size, size), 1 / size)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nodes", [LONE, UNEQUAL])
def test_complete_averaging_on_every_step_is_ddp(nodes: Nodes, momentum: float) -> None:
    """Local SGD with every = 1 and SGP with P = 1/n, all ranks taking part."""
    expected = ddp(START, pull, nodes=nodes, steps=9, lr=0.3, momentum=momentum)
    local = local_sgd(START, pull, nodes=nodes, steps=9, every=1, lr=0.3, momentum=momentum)
    pushed, w = sgp(START, pull, matrix=uniform, nodes=nodes, steps=9, lr=0.3, momentum=momentum)
    np.testing.assert_allclose(local, expected, rtol=1e-12)
    np.testing.assert_allclose(pushed, expected, rtol=1e-12)
    np.testing.assert_allclose(w, 1, rtol=1e-14)


def test_local_sgd_averages_after_step_k_where_every_divides_k_plus_1() -> None:
    """Apart at 1, 2 and 4, together at 3 and 6, the mean moving by -lr mean(slope) always."""
    z = local_sgd(START, slope, nodes=LONE, steps=7, every=3, lr=0.1)
    assert z.shape == (8, 4, 2)
    assert [bool(np.ptp(rows, axis=0).max() < 1e-12) for rows in z] == [
        k % 3 == 0 for k in range(8)
    ]
    np.testing.assert_allclose(z[1], START - 0.1 * TARGETS, rtol=1e-14)
    np.testing.assert_allclose(z[6], np.tile(START - 0.6 * TARGETS.mean(axis=0), (4, 1)))


def test_a_node_counts_once() -> None:
    """Gradients: mean in the node; parameters: mean of nodes, not of ranks."""
    per_node = np.stack([(TARGETS[0] + TARGETS[3]) / 2, TARGETS[2], TARGETS[1]])
    z = local_sgd(START, slope, nodes=UNEQUAL, steps=2, every=2, lr=0.1, within_local=True)
    np.testing.assert_allclose(z[1], START - 0.1 * per_node[[0, 2, 1, 0]], rtol=1e-14)
    np.testing.assert_allclose(z[2], np.tile(START - 0.2 * per_node.mean(axis=0), (4, 1)))
    pushed, _ = sgp(START, slope, matrix=uniform, nodes=UNEQUAL, steps=2, lr=0.1, within_local=True)
    np.testing.assert_allclose(pushed[2], z[2], rtol=1e-14)


@pytest.mark.parametrize("matrix", [ring, one_peer_exponential])
def test_sgp_on_a_regular_graph_is_gossip(matrix: Matrix) -> None:
    """w stays 1 and z = P_k (z - lr g), which on the symmetric ring is D-PSGD."""
    z, w = sgp(START + TARGETS, pull, matrix=matrix, nodes=LONE, steps=9, lr=0.3)
    np.testing.assert_array_equal(z[0], START + TARGETS)
    np.testing.assert_allclose(w, 1, rtol=1e-14)
    for k in range(9):
        gradients = np.stack([pull(rank, z[k, rank], k) for rank in range(4)])
        np.testing.assert_allclose(z[k + 1], matrix(4, k) @ (z[k] - 0.3 * gradients), rtol=1e-12)


@pytest.mark.parametrize("matrix", [one_peer_exponential, irregular])
def test_sgp_moves_the_mean_of_numerators_like_sgd(matrix: Matrix) -> None:
    """sum_i w_i z_i goes down by lr sum_i g_i a step, whatever w; sum_i w_i = n."""
    starts = START + TARGETS
    z, w = sgp(starts, slope, matrix=matrix, nodes=LONE, steps=9, lr=0.1)
    mass = (w[:, :, None] * z).sum(axis=1)
    expected = starts.sum(axis=0) - 0.1 * np.arange(10)[:, None] * TARGETS.sum(axis=0)
    np.testing.assert_allclose(mass, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(w.sum(axis=1), 4, rtol=1e-14)
    assert (np.abs(w - 1).max() > 0.1) == (matrix is irregular)


def test_sgp_on_an_irregular_graph_by_hand() -> None:
    """Three ranks, one number, gradients (0, 3, -1) z, lr 1: two steps worked out in fractions."""
    slopes = np.array([[0.0], [3.0], [-1.0]])
    z, w = sgp(
        np.array([1.0]),
        lambda rank, z, k: slopes[rank] * z,
        matrix=irregular,
        nodes=LONE[:3],
        steps=2,
        lr=1.0,
    )
    np.testing.assert_allclose(w[1], [5 / 6, 5 / 6, 4 / 3], rtol=1e-14)
    np.testing.assert_allclose(z[1, :, 0], [8 / 5, -4 / 5, 1 / 4], rtol=1e-14)
    np.testing.assert_allclose(w[2], [17 / 18, 25 / 36, 49 / 36], rtol=1e-14)
    np.testing.assert_allclose(z[2, :, 0], [53 / 68, 236 / 125, 577 / 490], rtol=1e-14)


def test_one_participant_is_plain_sgd() -> None:
    """A single node, whatever the method; the matrices of size 1 keep all."""
    expected = ddp(START, pull, nodes=((1, 0),), steps=5, lr=0.3)
    for matrix in (one_peer_exponential, ring, irregular):
        z, w = sgp(START, pull, matrix=matrix, nodes=((1, 0),), steps=5, lr=0.3, within_local=True)
        np.testing.assert_allclose(z, expected, rtol=1e-14)
        assert (w == 1).all()
