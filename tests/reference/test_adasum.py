"""The Adasum reference against known answers."""

import numpy as np
import pytest

from reference.adasum import adasum, bf16, combine, combine_layers, pairwise
from reference.participants import Array

KNOWN: dict[str, tuple[list[list[float]], list[float]]] = {
    "orthogonal": ([[1, 0], [0, 1]], [1, 1]),
    "equal": ([[3, -4], [3, -4]], [3, -4]),
    "at 45 degrees": ([[1, 0], [1, 1]], [1.25, 0.75]),
    "opposite": ([[3, 0], [-1, 0]], [1, 0]),
    "zero": ([[0, 0], [5, -2]], [5, -2]),
    "four": ([[1, 0], [1, 1], [0, 1], [1, -1]], [1.312217194570136, 0.5565610859728507]),
    "four reordered": ([[1, 0], [0, 1], [1, 1], [1, -1]], [2.0, 0.5]),
    "three parallel": ([[1, 2], [2, 4], [6, 12]], [3, 6]),
    "three": ([[1, 0], [1, 1], [0, 1]], [0.9558823529411764, 1.3235294117647058]),
    "eight": (
        [
            [1, 2, 3, 4],
            [2, -1, 0, 1],
            [0.5, 0.5, 0.5, 0.5],
            [-1, 3, -2, 1],
            [4, 0, 0, 1],
            [0, 1, 1, 0],
            [2, 2, -1, -1],
            [1, 1, 1, -3],
        ],
        [5.480519316849735, 5.641206221877207, 1.803625585132163, 3.461288266322489],
    ),
}
LAYERED = (np.array(KNOWN["eight"][0][:4]), [2.05, 3.85, 1.454018918918919, 4.185386486486486])


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
    vectors, expected = KNOWN[name]
    np.testing.assert_allclose(combine([np.array(v) for v in vectors]), expected, rtol=1e-14)


def test_layers_are_combined_one_by_one() -> None:
    rows, expected = LAYERED
    np.testing.assert_allclose(combine_layers(rows, (2, 2)), expected, rtol=1e-14)


def test_norm_of_a_pair_depends_on_the_angle_alone() -> None:
    """|AS|^2 = (|a|^2 + |b|^2)(1 - 3/4 c^2) + 1/2 |a||b| c^3."""
    random = np.random.default_rng(0)
    for _ in range(50):
        a, b = random.normal(size=(2, 3)) * random.uniform(0.1, 10, size=(2, 1))
        c = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        squares = a @ a + b @ b
        expected = squares * (1 - 0.75 * c**2)
        expected += 0.5 * np.linalg.norm(a) * np.linalg.norm(b) * c**3
        np.testing.assert_allclose(pairwise(a, b) @ pairwise(a, b), expected, rtol=1e-12)


def test_training_by_hand() -> None:
    """Two ranks, gradients (1, 0) and (1, 1) in one layer, lr 1: -[1.25, 0.75] an exchange."""
    slopes: Array = np.array([[1.0, 0.0], [1.0, 1.0]])
    z = adasum(
        np.zeros(2),
        lambda rank, z, k: slopes[rank],
        layers=(2,),
        nodes=((0,), (1,)),
        steps=4,
        lr=1.0,
        every=2,
    )
    np.testing.assert_allclose(z[1], -slopes)
    np.testing.assert_allclose(z[2], np.tile([-2.5, -1.5], (2, 1)))
    np.testing.assert_allclose(z[4], 2 * z[2])


def test_bf16_keeps_eight_bits_and_rounds_ties_to_even() -> None:
    ulp = 2.0**-7
    given = np.array([1.0, 1 + 0.49 * ulp, 1 + 0.5 * ulp, 1 + 1.5 * ulp, -3.14159])
    assert bf16(given).tolist() == [1.0, 1.0, 1.0, 1 + 2 * ulp, -3.140625]
