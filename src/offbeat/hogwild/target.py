"""One parameter in shared memory, as one worker updates it."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float32, float64

from offbeat.functional import masked_adam
from offbeat.hogwild import kernels


@final
class Target:
    """theta, m and v of a parameter, with views of the same memory that numpy and kernels use.

    The views are made once in a process, since making one costs more than updating a small
    tensor. Other dtypes and layouts than contiguous float32 and float64 go through torch.
    """

    def __init__(self, theta: Tensor, m: Tensor, v: Tensor, counts: Tensor) -> None:
        """Look at the memory; no copy. ``counts[0]``: updates that this worker began."""
        self.counts: NDArray[np.int64] = counts.numpy()
        self.pointer = theta.data_ptr()
        self._tensors = (theta, m, v)
        self._compiled = theta.dtype in (float32, float64) and theta.is_contiguous()
        self._flat = [t.view(-1).numpy() for t in self._tensors] if self._compiled else []
        self._rows: _Rows | None = None

    def is_finite(self, gradient: Tensor) -> bool:
        """Whether no element is infinite or NaN. One read of the gradient."""
        values = gradient._values() if gradient.is_sparse else gradient
        if self._compiled:
            return bool(kernels.is_finite(values.contiguous().view(-1).numpy()))
        return bool(values.isfinite().all())

    def update(
        self,
        gradient: Tensor,
        *,
        alpha: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
    ) -> None:
        """Apply a gradient; see :func:`offbeat.functional.masked_adam`."""
        if not self._compiled or (gradient.is_sparse and gradient.sparse_dim() != 1):
            masked_adam(*self._tensors, gradient, alpha=alpha, betas=betas, eps=eps, decay=decay)
            return
        b1, b2 = betas
        numbers = (alpha, b1, 1.0 - b1, b2, 1.0 - b2, eps, 1.0 - decay)
        constants = np.array(numbers, self._flat[0].dtype)
        if not gradient.is_sparse:
            kernels.update_dense(*self._flat, gradient.contiguous().view(-1).numpy(), constants)
            return
        if self._rows is None:
            self._rows = _Rows(len(self._tensors[0]))
        kernels.update_rows(*self._flat, *self._rows.sum(gradient), constants)


class _Rows:
    """Scratch to add up the duplicates of a sparse gradient: 4 bytes for each row."""

    def __init__(self, rows: int) -> None:
        self._place = np.full(rows, -1, np.int32)
        self._unique = np.empty(0, np.int64)
        self._sums: NDArray[Any] = np.empty((0, 0))

    def sum(self, gradient: Tensor) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Different rows, the sum of each, and how many; the gradient stays as it is."""
        rows = gradient._indices()[0].numpy()
        values = gradient._values().contiguous().view(len(rows), -1).numpy()
        if len(self._unique) < len(rows):
            self._unique = np.empty(len(rows), np.int64)
            self._sums = np.empty(values.shape, values.dtype)
        count = kernels.sum_rows(rows, values, self._place, self._unique, self._sums)
        return self._unique, self._sums, count
