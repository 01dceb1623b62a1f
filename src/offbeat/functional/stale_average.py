r"""Averages with stale parameters, and averages from 16-bit differences.

DASO's two exchanges between nodes (Coquelin et al. 2021, section 3). All tensors are flat; sums
are float32 or wider.
"""

from torch import Tensor

from offbeat.functional.packing import cache_blocks


def merge_stale_sum(total: Tensor, x: Tensor, wait: int, size: int) -> None:
    r"""Merge a sum of ``size`` models with a model that is W = ``wait`` steps ahead, in place.

    .. math:: x \leftarrow \frac{2W x + \sum_{i=1}^{P} x_i}{2W + P}
        = x + \frac{\sum_{i=1}^{P} x_i - P x}{2W + P}

    ``total`` holds the sum and then the result. The second form has small rounding errors for
    similar models, and keeps equal ones where P x is exact, as for P = 2 and 4. One pass:
    reads both, writes ``total`` (eq. 1, where W is written S).

    >>> import torch
    >>> merge_stale_sum(total := torch.tensor([4.0]), torch.tensor([3.0]), wait=1, size=2)
    >>> total  # (2 * 3 + 4) / 4
    tensor([2.5000])
    """
    for s, x_ in cache_blocks(total, x):
        s.sub_(x_, alpha=size).div_(2 * wait + size).add_(x_)


def merge_exact_sum(total: Tensor, x: Tensor, sent: Tensor, size: int) -> None:
    r"""Set a model to the mean of ``size`` models and its own progress since, in place.

    .. math:: x \leftarrow \frac{1}{P} \sum_{i=1}^{P} x_i + (x - x^{sent})
        = x + \frac{\sum_{i=1}^{P} x_i - P x^{sent}}{P}

    ``total`` holds the sum and then the result, and ``sent`` the model that this one has added to
    the sum. The mean of all models is not changed. One pass: reads three, writes ``total``.

    >>> import torch
    >>> total, x, sent = torch.tensor([4.0]), torch.tensor([3.0]), torch.tensor([1.0])
    >>> merge_exact_sum(total, x, sent, size=2)
    >>> total  # 4 / 2 + (3 - 1)
    tensor([4.])
    """
    for s, x_, sent_ in cache_blocks(total, x, sent):
        s.sub_(sent_, alpha=size).div_(size).add_(x_)


def progress(every: int, wait: int, size: int) -> float:
    r"""Return the share of the optimizers' progress that is left by :func:`merge_stale_sum`.

    .. math:: 1 - \frac{W P}{(2W + P) B}

    of updates that are equal on all P = ``size`` models, where a sum starts every B = ``every``
    steps: the sum counts P times, and lacks the progress of W = ``wait`` steps.

    >>> progress(every=8, wait=2, size=4), round(progress(every=1, wait=1, size=8), 12)
    (0.875, 0.2)
    """
    return 1 - wait * size / ((2 * wait + size) * every)


def cast_difference(x: Tensor, reference: Tensor, error: Tensor, message: Tensor) -> None:
    r"""Fill a 16-bit message with the difference of a model to a shared reference.

    .. math:: m = \mathrm{cast}(x - r + e), \quad e \leftarrow x - r + e - m

    e is the accumulated error of earlier casts. A cast of x itself would lose every update
    that is smaller than the spacing of 16-bit numbers around x. One pass: reads
    x, r and e, writes e and m.

    >>> import torch
    >>> x, r, e = torch.tensor([4.0 + 2**-12]), torch.tensor([4.0]), torch.zeros(1)
    >>> cast_difference(x, r, e, m := torch.zeros(1).bfloat16())
    >>> m.item() == 2**-12, x.bfloat16().item()
    (True, 4.0)
    """
    for x_, r, e, m in cache_blocks(x, reference, error, message):
        e.add_(x_ - r)
        m.copy_(e)
        e.sub_(m)
