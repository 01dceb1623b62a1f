r"""Averaging of pairs through snapshots (Lian et al. 2018, Algorithm 1).

Let z be a participant's parameters and δ the sum of changes by exchanges that are not yet added to
z. Two partners exchange snapshots x of z + δ, and each adds half of the difference:

.. math:: \delta_i \leftarrow \delta_i + (x_j - x_i)/2, \quad
    \delta_j \leftarrow \delta_j + (x_i - x_j)/2

The two changes cancel bit for bit, however z changes meanwhile. All tensors are flat; δ is float32
or wider.
"""

from torch import Tensor

from offbeat.functional.packing import cache_blocks


def take_snapshot(z: Tensor, delta: Tensor, out: Tensor) -> None:
    r"""Write a snapshot, rounded once, to ``out``: :math:`x = z + \delta`.

    One pass: reads z and δ, writes ``out``.

    >>> import torch
    >>> take_snapshot(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), out := torch.empty(2))
    >>> out
    tensor([1.5000, 2.0000])
    """
    for z_, d, x in cache_blocks(z, delta, out):
        x.copy_(z_ + d)


def add_half_difference(delta: Tensor, mine: Tensor, theirs: Tensor) -> None:
    r"""Move half way to a partner: :math:`\delta_i \leftarrow \delta_i + (x_j - x_i)/2`.

    One pass: reads δ and both snapshots, writes δ.

    >>> import torch
    >>> add_half_difference(
    ...     delta := torch.zeros(2), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])
    ... )
    >>> delta
    tensor([1., 0.])
    """
    for d, x, y in cache_blocks(delta, mine, theirs):
        d.add_(y.to(d.dtype) - x, alpha=0.5)


def apply_delta(z: Tensor, delta: Tensor) -> None:
    r"""Add the changes of exchanges to the parameters: :math:`z \leftarrow z + \delta`, in place.

    The rounding error of z stays in δ, so that 16-bit parameters lose nothing. One pass:
    reads and writes both.

    >>> import torch
    >>> apply_delta(z := torch.tensor([256.0]).bfloat16(), delta := torch.tensor([3.0]))
    >>> z, delta
    (tensor([260.], dtype=torch.bfloat16), tensor([-1.]))
    """
    for z_, d in cache_blocks(z, delta):
        moved = (z_ + d).to(z_.dtype)
        d.sub_(moved.to(d.dtype) - z_)
        z_.copy_(moved)
