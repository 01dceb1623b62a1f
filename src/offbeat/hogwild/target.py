"""One parameter in shared memory, as one worker updates it."""

import math
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float32, float64

from offbeat.functional import masked_adam
from offbeat.kernels import lock_free_adam
from offbeat.kernels.bias_correction import corrections


@final
class Target:
    """theta, m and v of a parameter, and views of the same memory for numpy and kernels.

    The views are created once in a process, since creating one takes longer than updating a small
    tensor. Dtypes and layouts other than contiguous float32 and float64 are updated by torch.
    """

    def __init__(
        self, theta: Tensor, m: Tensor, v: Tensor, steps: Tensor, counts: Tensor | None
    ) -> None:
        """Create views of the memory.

        ``steps[0]`` is the number of updates of this worker, ``counts`` that of each coordinate,
        where the bias is corrected by coordinate.
        """
        self.steps: NDArray[np.int64] = steps.numpy()
        self.pointer = theta.data_ptr()
        self._tensors = (theta, m, v)
        self._compiled = theta.dtype in (float32, float64) and theta.is_contiguous()
        self._flat = [t.view(-1).numpy() for t in self._tensors] if self._compiled else []
        self._counts = counts
        self._flat_counts = None if counts is None else counts.view(-1).numpy()
        self._width = theta.shape[1:].numel()  # of a row

    def is_finite(self, gradient: Tensor) -> bool:
        """Return whether all elements are finite. One read of the gradient."""
        values = gradient._values() if gradient.is_sparse else gradient
        if self._compiled:
            return bool(lock_free_adam.is_finite(_flat(values)))
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
            masked_adam(
                *self._tensors, gradient, alpha=alpha, betas=betas, eps=eps, decay=decay,
                counts=self._counts,
            )  # fmt: skip
            return
        b1, b2 = betas
        numbers = (alpha, b1, 1.0 - b1, b2, math.sqrt(1.0 - b2), eps, 1.0 - decay)
        constants = np.array(numbers, self._flat[0].dtype)
        counted = None
        if self._flat_counts is not None:
            counted = (self._flat_counts, corrections(betas, constants.dtype))
        if not gradient.is_sparse:
            lock_free_adam.update_dense(*self._flat, _flat(gradient), constants, counted)
            return
        rows, values = gradient._indices().numpy()[0], _flat(gradient._values())
        lock_free_adam.update_rows(*self._flat, rows, values, self._width, constants, counted)


def _flat(tensor: Tensor) -> NDArray[Any]:
    return tensor.numpy().reshape(-1)
