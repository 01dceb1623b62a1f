"""Top-k sparsification of gradients with error feedback (Shi et al. 2020)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from offbeat.platform.device import is_on_host

BLOCK = 32  # entries whose largest stands for all of them
SMALL = 2**15  # entries; below this one torch.topk is as fast
LARGE = 2**17  # entries; from here on a sample is worth its fixed cost
STRIDE = 101  # one entry in 101 is sampled; a prime, so that rows of a matrix do not alias


def count_kept(numel: int, density: float) -> int:
    r"""Return how many entries of a layer are sent: :math:`k = \max(1, \lfloor \rho d \rfloor)`.

    >>> count_kept(2500, 0.001), count_kept(10, 0.001), count_kept(0, 0.5)
    (2, 1, 0)
    """
    return min(numel, max(1, int(density * numel)))


def top_k(x: Tensor, k: int) -> Tensor:
    r"""Return the indices (k,) of the ``k`` largest magnitudes of a flat ``x``, exactly.

    .. math:: TopK(x, k)_i = x_i \; \mathrm{if} \; |x_i| \geq thr, \; \mathrm{else} \; 0

    with thr the k-th largest :math:`|x|` (eq. 4 of Shi et al. 2020; exactly k of tied entries).
    Indices are int64 and unordered. NaN counts as largest, followed by infinity, so that the
    selected values are finite only if all of ``x`` is. The k largest entries lie in the k blocks
    of 32 with the largest maxima: ``x`` is read twice on a CPU (maximum, minimum of each block),
    once elsewhere, and never written. Extra memory: d/16 + 32 k entries. Deterministic, and does
    not synchronize with a GPU.

    >>> top_k(torch.tensor([1.0, -3.0, 0.0, 2.0]), 2).sort().values
    tensor([1, 3])
    """
    if x.numel() < SMALL or 2 * k * BLOCK > x.numel():
        return x.abs().topk(k, sorted=False).indices
    blocks = _block_maxima(x).topk(k, sorted=False).indices
    candidates = _candidates(x, blocks)
    return _place(x, blocks, candidates.topk(k, sorted=False).indices)


def sampled_top_k(x: Tensor, k: int) -> Tensor:
    """Return the result of :func:`top_k` by double sampling, which is faster on a CPU.

    A threshold is estimated from every 101st entry, slightly low; the exact top-k is taken among
    the entries above it, in the blocks that reach it. If these are too few, or too many to save
    time, :func:`top_k` is used. The sample affects the time, never the result (except in ties).

    On a GPU the host would have to wait for the number of entries above the threshold, and without
    it a memory of fixed size could lack some of the k largest. There :func:`top_k` is used at once.
    It has double sampling's form: a first selection among d/32 values, here maxima of blocks
    instead of a sample, and a second one among 32 k. It reads ``x`` once, as that must, and does
    not wait.

    Source: Lin et al. 2018, "Deep Gradient Compression", section 3; Shi et al. 2020, section 5.

    >>> x = torch.arange(100_000.0)
    >>> sampled_top_k(x, 2).sort().values
    tensor([99998, 99999])
    """
    if not is_on_host(x) or x.numel() < LARGE:
        return top_k(x, k)
    threshold = _sampled_threshold(x, k)
    if not threshold > 0:  # mostly zeros, or NaN
        return top_k(x, k)
    # Not "at least": NaN must be looked at.
    blocks = (_block_maxima(x) < threshold).logical_not_().nonzero().view(-1)
    some = 2 * BLOCK * blocks.numel() < x.numel()
    candidates = _candidates(x, blocks) if some else x.abs()
    survivors = (candidates < threshold).logical_not_().nonzero().view(-1)
    if not k <= survivors.numel() <= x.numel() // 2:
        return top_k(x, k)
    chosen = survivors[candidates[survivors].topk(k, sorted=False).indices]
    return _place(x, blocks, chosen) if some else chosen


def extract(acc: Tensor, indices: Tensor) -> Tensor:
    r"""Remove the entries at ``indices`` from ``acc`` and return them; the residual remains.

    .. math:: \epsilon_{t} = acc_t - TopK(acc_t, k), \quad acc_t = \epsilon_{t-1} + \alpha G_t

    ``acc`` (d,) is changed in place. Result and residual add up to it (Algorithm 1, lines 7, 8).

    >>> acc = torch.tensor([1.0, -3.0, 2.0])
    >>> extract(acc, torch.tensor([1])), acc
    (tensor([-3.]), tensor([1., 0., 2.]))
    """
    values = acc.index_select(0, indices)
    acc.index_fill_(0, indices, 0.0)
    return values


def delta(total: Tensor, left: Tensor, k: int) -> float:
    r"""Return the error of the ranks' own top-k relative to that of a random choice of k.

    .. math::
        \delta = \frac{\|\sum_p x_p - \sum_p TopK(x_p, k)\|^2}
                      {E \|\sum_p x_p - RandK(\sum_p x_p, k)\|^2}
               = \frac{\|left\|^2}{(1 - k/d)\, \|total\|^2}

    ``total`` (d,) is the sum of the ranks' vectors and ``left`` (d,) that of their residuals. A
    value of at most 1 is the paper's assumption 1 and no identity: x = (10, 1) and (-10, 1) with
    k = 1 give 2 (eq. 20).

    >>> delta(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 2.0]), k=1)
    2.0
    """
    numel = total.numel()
    random = (1 - k / numel) * float(total.double().square().sum())
    return float(left.double().square().sum()) / random if random > 0 else 0.0


def _block_maxima(x: Tensor) -> Tensor:
    """Return the largest magnitude of every whole block; NaN for a block that contains NaN."""
    rows = x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    if not is_on_host(x):
        maxima: Tensor = torch.linalg.vector_norm(rows, torch.inf, dim=1)
        return maxima
    # Two reading passes: abs() would write one as large as x, and torch's fused ones (aminmax,
    # the infinity norm) are not vectorized for short rows, 20 and 50 ms against 4 for 10 M.
    return torch.maximum(rows.amax(1), rows.amin(1).neg_())


def _candidates(x: Tensor, blocks: Tensor) -> Tensor:
    """Return magnitudes of the entries of these blocks, and of those after the last whole block."""
    whole = x.numel() // BLOCK * BLOCK
    rows = x[:whole].view(-1, BLOCK).index_select(0, blocks)
    return torch.cat((rows.view(-1), x[whole:])).abs_()


def _place(x: Tensor, blocks: Tensor, chosen: Tensor) -> Tensor:
    """Return the indices in ``x`` of the chosen candidates."""
    taken = blocks.numel() * BLOCK
    whole = x.numel() // BLOCK * BLOCK
    first = pad(blocks * BLOCK, (0, 1), value=whole)  # a tensor made of a list would be waited for
    row = chosen.div(BLOCK, rounding_mode="floor").clamp_(max=blocks.numel())
    return first[row] + torch.where(chosen < taken, chosen % BLOCK, chosen - taken)


def _sampled_threshold(x: Tensor, k: int) -> Tensor:
    """Estimate from a sample a magnitude that slightly more than k entries reach."""
    sample = x[::STRIDE].abs()
    expected = k * sample.numel() / x.numel()
    # Three standard deviations of the count above it, and three entries where it is small.
    rank = int(expected + 3 * expected**0.5) + 3
    return sample.topk(min(rank, sample.numel()), sorted=False).values.amin()
