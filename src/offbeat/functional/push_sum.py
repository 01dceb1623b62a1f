"""Push-sum averaging: numerator, mixing, de-biasing (Assran et al. 2019, section 3)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def numerator(z: Sequence[Tensor], anchor: Sequence[Tensor], weight: float) -> None:
    r"""Turn stepped parameters into the push-sum numerator, in place.

    .. math:: x = w\,z_{anchor} + (z - z_{anchor}) = z + (w - 1)\,z_{anchor}

    ``z`` are the parameters after the optimizer step, ``anchor`` those before it. For SGD this is
    the paper's :math:`x - \gamma \nabla F(z)` (Algorithm 1, line 3): the update is added to the
    numerator unscaled, whatever the weight. One pass; none at ``weight == 1``.

    >>> z = [torch.tensor([1.0, 2.0])]
    >>> numerator(z, [torch.tensor([2.0, 2.0])], weight=0.5)
    >>> z
    [tensor([0., 1.])]
    """
    if weight != 1.0:
        torch._foreach_add_(list(z), list(anchor), alpha=weight - 1.0)


def mix(x: Tensor, keep: float, received: Sequence[Tensor]) -> None:
    r"""Keep one's own share and add what arrived, in place.

    .. math:: x_i \leftarrow p_{ii}\,x_i + \sum_j p_{ij}\,x_j

    ``received`` holds the products :math:`p_{ij} x_j`, scaled by their senders (Algorithm 1,
    line 5). One pass for the first message, one more for each further one. 16-bit numerators
    are summed in float32 and rounded once, so that mass is lost to one rounding, not to several.

    >>> x = torch.tensor([4.0])
    >>> mix(x, 0.5, [torch.tensor([3.0])])
    >>> x
    tensor([5.])
    """
    if x.dtype.itemsize >= 4:
        if received:
            torch.add(received[0], x, alpha=keep, out=x)
        else:
            x.mul_(keep)
        for message in received[1:]:
            x.add_(message)
        return
    total = x.float().mul_(keep)
    for message in received:
        total.add_(message)
    x.copy_(total)


def de_bias(x: Sequence[Tensor], weight: float) -> None:
    r"""Turn numerators into the model, in place: :math:`z = x / w` (Algorithm 1, line 7).

    >>> x = [torch.tensor([1.0])]
    >>> de_bias(x, 0.5)
    >>> x
    [tensor([2.])]
    """
    if weight != 1.0:
        torch._foreach_mul_(list(x), 1.0 / weight)
