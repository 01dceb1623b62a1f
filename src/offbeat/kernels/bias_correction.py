"""The factors by which Adam corrects its step for moments that began at zero, as a table."""

from functools import lru_cache
from math import ceil, log
from typing import Any

import numpy as np

from offbeat.kernels.compile import Array

LONGEST = 2**22  # entries; reached where the larger beta is above 0.99999
SETTLED = log(2.0**-53)  # the logarithm of a power of beta that is lost beside 1


@lru_cache(maxsize=16)
def corrections(betas: tuple[float, float], dtype: np.dtype[Any]) -> Array:
    r"""Return :math:`\sqrt{1 - \beta_2^n} / (1 - \beta_1^n)` for n = 1, 2, ...

    Entry k is the factor of a coordinate that was updated k times before; the last one is that of
    all later updates, and is 1. A kernel looks the factor up, since two powers take several times
    as long as the update itself. 36,719 entries at beta2 = 0.999, of which a kernel reads those
    of the numbers of updates that occur. Raises ``ValueError`` for more than 2^22.

    >>> corrections((0.5, 0.75), np.dtype(np.float64))[:2]  # sqrt(1/4) / (1/2), ...
    array([1.       , 0.8819171])
    """
    require_table(betas)
    n = np.arange(1.0, _length(betas) + 1.0)
    factors = np.sqrt(1.0 - betas[1] ** n) / (1.0 - betas[0] ** n)
    return factors.astype(dtype)


def require_table(betas: tuple[float, float]) -> None:
    """Raise ``ValueError`` for betas of which a table would be too long."""
    if _length(betas) > LONGEST:
        raise ValueError(
            f"betas={betas} with bias_correction='coordinate', expected at most 0.99999; use "
            "bias_correction='step'"
        )


def _length(betas: tuple[float, float]) -> int:
    slowest = max(betas)
    return ceil(SETTLED / log(slowest)) if slowest > 0.0 else 1
