"""Whether numbers are finite."""

from collections.abc import Collection

from torch import Tensor
from torch.nn.utils import get_total_norm


def all_finite(tensors: Collection[Tensor]) -> bool:
    """Return whether no element is infinite or NaN. One reading pass; the host waits for a GPU.

    >>> import torch
    >>> all_finite([torch.tensor([3e38, -3e38])]), all_finite([torch.tensor([0.0, torch.nan])])
    (True, False)
    """
    # The norm reads all tensors in one pass. It may overflow: then each is looked at.
    return bool(get_total_norm(tensors).isfinite()) or all(
        bool(tensor.isfinite().all()) for tensor in tensors
    )
