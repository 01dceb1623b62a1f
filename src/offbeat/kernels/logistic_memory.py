"""What the kernels of logistic regression read and write."""

from typing import Any, NamedTuple

from offbeat.kernels.compile import Array

Index = Any  # unsigned; signed ones are tested for a negative value at every access


class Data(NamedTuple):
    """Rows in CSR form, with unsigned ``indices`` (no test for negative ones), and their ``y``."""

    indptr: Array
    indices: Array
    data: Array
    y: Array  # 0.0 or 1.0 in binary problems, the number of the class otherwise


class Memory(NamedTuple):
    """Flat memory of one thread: a row for each feature and a last one for the intercept.

    A row of ``shared`` holds theta of each class and then the l2 factor; a row of ``own`` holds m
    of each class, then v, then the numbers of updates where the bias is corrected by coordinate (a
    float32 counts to 2^24, far beyond what is corrected). Shared moments are in the rows of theta,
    and ``own`` is then the same memory from the first m on. A row takes one address computation;
    four arrays would take four.
    """

    shared: Array
    own: Array
    width: Index  # elements of a row of ``shared``
    stride: Index  # elements of a row of ``own``


class Thread(NamedTuple):
    """Private state of a thread: rows by hand, [position, steps, hand], and the random state."""

    hands: Array
    counts: Array
    random: Array


class Settings(NamedTuple):
    """Hyperparameters; ``betas`` are b1, 1 - b1, b2, 1 - b2 and eps in theta's dtype.

    A tuple, since the elements of an array would be loaded again after every store.
    """

    alpha: float
    b1: float
    b2: float
    betas: tuple[Any, ...]
    batch: int
    columns: int
    workers: int
    private: bool
    intercept: bool
