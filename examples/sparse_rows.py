"""A sparse binary classification problem of any size."""

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Rows = sp.csr_array
Labels = NDArray[np.float32]


def generate(rows: int, features: int, nonzeros: int) -> tuple[Rows, Labels]:
    """Normal values at uniformly drawn features; labels by a random hyperplane, with noise.

    As in Renda, section 4.2, with the number of non-zero features fixed for each row.
    """
    random = np.random.default_rng(0)
    columns = np.sort(random.integers(features, size=(rows, nonzeros), dtype=np.int32), axis=1)
    values = random.standard_normal((rows, nonzeros), dtype=np.float32)
    starts = np.arange(0, rows * nonzeros + 1, nonzeros, dtype=np.int32)
    x = sp.csr_array((values.ravel(), columns.ravel(), starts), shape=(rows, features))
    plane = random.standard_normal(features, dtype=np.float32)
    chance = 1 / (1 + np.exp(-(x @ plane)))
    return x, (random.random(rows) < chance).astype(np.float32)
