"""The paper's sparse problem, and rows like documents."""

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Vector = NDArray[np.float32]
BATCH, L2 = 16, 0.002


@dataclass(frozen=True)
class Problem:
    """Rows and labels to learn from, and others to test with."""

    x: sp.csr_array
    y: Vector
    test_x: sp.csr_array
    test_y: Vector

    def loss(self, theta: Vector) -> float:
        z = self.x @ theta
        return float(np.mean(np.logaddexp(0, z) - self.y * z) + L2 / 2 * theta @ theta)

    def error(self, theta: Vector) -> float:
        return float(np.mean((self.test_x @ theta > 0) != self.test_y))


def generate(density: float = 0.01, n: int = 10_000, d: int = 4096) -> Problem:
    """Normal features, each with probability ``density``; labels by a random hyperplane (4.2)."""
    random = np.random.default_rng(0)
    plane = random.standard_normal(d)

    def half() -> tuple[sp.csr_array, Vector]:
        x = sp.random_array(
            (n, d), density=density, format="csr", rng=random, data_sampler=random.standard_normal
        )
        y = random.random(n) < 1 / (1 + np.exp(-(x @ plane)))
        x = x.astype(np.float32)
        x.indices, x.indptr = x.indices.astype(np.int32), x.indptr.astype(np.int32)
        return x, y.astype(np.float32)

    return Problem(*half(), *half())


def whole(problem: Problem) -> Problem:
    """The same rows with their zeros stored, as the paper's code reads them."""
    n, d = problem.x.shape
    every = np.tile(np.arange(d, dtype=np.int32), n)
    starts = np.arange(0, n * d + 1, d, dtype=np.int32)
    x = sp.csr_array((problem.x.toarray().ravel(), every, starts), shape=(n, d))
    return Problem(x, problem.y, problem.test_x, problem.test_y)


def words(n: int, d: int, each: int = 75) -> Problem:
    """Rows like documents: about ``each`` of d words, drawn by Zipf's law, of length 1.

    Features are in no order of frequency, as in RCV1 (47,236 features, 75 to a row). Labels by a
    random hyperplane; there are no rows to test with.
    """
    random = np.random.default_rng(0)
    draws = 5 * each // 4  # some words are drawn twice
    frequent = np.cumsum(1.0 / np.arange(1, d + 1))
    drawn = np.searchsorted(frequent, frequent[-1] * random.random((n, draws)))
    feature = random.permutation(d)[drawn].ravel().astype(np.int32)
    rows = np.repeat(np.arange(n, dtype=np.int32), draws)
    x = sp.coo_array((np.ones(len(rows), np.float32), (rows, feature)), shape=(n, d)).tocsr()
    x.data[:] = random.lognormal(size=x.nnz)
    x.data /= np.repeat(np.sqrt(np.add.reduceat(x.data**2, x.indptr[:-1])), np.diff(x.indptr))
    x.indices, x.indptr = x.indices.astype(np.int32), x.indptr.astype(np.int32)
    logits = x @ random.standard_normal(d).astype(np.float32)
    y = (random.random(n) < 1 / (1 + np.exp(-4 * logits))).astype(np.float32)
    return Problem(x, y, x[:0], y[:0])
