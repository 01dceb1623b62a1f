r"""Push-sum averaging in two passes over memory (Assran et al. 2019, section 3).

With z the parameters after the optimizer step, a those before it (the anchor) and w the weight,
the push-sum numerator is

.. math:: x = w\,a + (z - a) = z + (w - 1)\,a

For SGD that is the paper's :math:`x - \gamma \nabla F(z)` (Algorithm 1, line 3): the update is
added to the numerator unscaled, whatever the weight. Where w stays 1 there is no anchor and x = z.
All tensors are flat; sums of 16-bit tensors run in float32 and are rounded once.

The anchor of 16-bit parameters is the float32 model whose rounding they were before the step:

.. math:: x = w\,a + (z - \mathrm{round}(a))

So what rounding takes from the parameters stays in the sums, and small steps add up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.functional.packing import accumulation_dtype, cache_blocks

Messages = Sequence[tuple[float, int, Tensor]]  # share, number of receivers, message


def numerator(z: Tensor, anchor: Tensor | None, weight: float) -> Tensor:
    r"""Return the numerator of stepped parameters: :math:`x = w\,a + (z - \mathrm{round}(a))`.

    That is z where w is 1 and a has the dtype of z, or where there is no anchor.

    >>> numerator(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), weight=0.5)
    tensor([0., 1.])
    >>> numerator(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 2**-10]), weight=1.0) - 1
    tensor([0.0010])
    """
    if anchor is not None and anchor.dtype != z.dtype:
        return torch.add(z.to(anchor.dtype) - anchor.to(z.dtype), anchor, alpha=weight)
    if anchor is None or weight == 1.0:
        return z.to(accumulation_dtype(z.dtype))
    return torch.add(z, anchor, alpha=weight - 1.0)


def weight_growth(weight: float, samples: float, given: float) -> float:
    """Return by how much a weight grows for a step of ``samples``, of which it has ``given``.

    Others may have it by now: at most half is taken back at once, and nothing below 2^-50.

    >>> weight_growth(1.0, samples=4.0, given=1.0), weight_growth(1.0, samples=0.0, given=4.0)
    (3.0, -0.5)
    """
    return max(samples - given, -weight / 2 if weight > 2.0**-50 else 0.0)


def add_update(anchor: Tensor, z: Tensor, share: float) -> Tensor:
    r"""Add a share of an update to the anchor: :math:`a \leftarrow a + s (z - \mathrm{round}(a))`.

    Returns the anchor. What rounding has taken from z stays in it.

    >>> add_update(torch.tensor([1.0]), torch.tensor([3.0]), share=0.25)
    tensor([1.5000])
    """
    if anchor.dtype == z.dtype:
        return torch.lerp(anchor, z, share, out=anchor)
    return anchor.add_(z.to(anchor.dtype) - anchor.to(z.dtype).to(anchor.dtype), alpha=share)


def fill_messages(z: Tensor, anchor: Tensor | None, weight: float, messages: Messages) -> None:
    r"""Fill the messages of one exchange, and leave the rest of the numerator in ``anchor``.

    .. math:: m_j = \mathrm{cast}(p_{ji}\,x_i), \quad a \leftarrow x_i - \sum_j m_j

    ``messages`` lists (share p, number of receivers, message (d,) to fill). The rest is x minus
    the messages as sent: the error of a cast to 16 bits stays with the sender, and no mass is
    lost. Without an anchor only messages are written, and :func:`add_messages` subtracts them.
    One pass: reads z and a, writes a and the messages (Algorithm 1, line 4).

    >>> z, message = torch.tensor([3.0]), torch.empty(1)
    >>> fill_messages(z, None, 1.0, [(0.5, 1, message)])
    >>> message
    tensor([1.5000])
    """
    outs = [out for _, _, out in messages]
    held = () if anchor is None else (anchor,)
    for z_, *rest in cache_blocks(z, *held, *outs):
        a = rest[0] if held else None
        x = numerator(z_, a, weight)
        for (share, _, _), out in zip(messages, rest[len(held) :], strict=True):
            out.copy_(x * share) if out.dtype != x.dtype else torch.mul(x, share, out=out)
        if a is not None:
            a.copy_(_less(x, messages, rest[1:]))


def add_messages(
    z: Tensor,
    anchor: Tensor | None,
    weight: float,
    sent: Messages,
    arrived: Sequence[Tensor],
) -> None:
    r"""Add received messages to the rest of the numerator, and de-bias the sum, in place.

    .. math:: z_i = a = (x_i - \sum_j m_j + \sum_j m_{ij}) / w_i

    ``weight`` is the new weight; ``anchor`` (d,) holds what :func:`fill_messages` left there.
    Without an anchor the weight is one, and the messages ``sent`` are subtracted from z here. One
    pass: reads a (or z and the sent messages) and the received ones, writes z and a (Algorithm 1,
    lines 5 to 7).

    >>> z = torch.tensor([3.0])
    >>> add_messages(z, None, 1.0, [(0.5, 1, torch.tensor([1.5]))], [torch.tensor([4.5])])
    >>> z
    tensor([6.])
    """
    held = () if anchor is None else (anchor,)
    outs = () if held else tuple(out for _, _, out in sent)
    for z_, *rest in cache_blocks(z, *held, *outs, *arrived):
        kept = (
            rest[0] if held else _less(z_.to(accumulation_dtype(z_.dtype)), sent, rest[: len(outs)])
        )
        messages = rest[len(held) + len(outs) :]
        x = kept + sum_messages(messages, kept.dtype) if messages else kept
        if held:
            _settle(x, weight, z_, rest[0])
        else:
            z_.copy_(x)


def fill_and_add(
    z: Tensor,
    anchor: Tensor | None,
    before: float,
    after: float,
    messages: Messages,
    arrived: Sequence[Tensor],
) -> None:
    """Apply :func:`fill_messages` at weight ``before``, then :func:`add_messages` at ``after``.

    For messages that arrived before the next ones are sent. The result equals that of the two
    calls bit for bit: the time of arrival must not change a run.

    >>> z, anchor, message = torch.tensor([3.0]), torch.tensor([2.0]), torch.empty(1)
    >>> fill_and_add(z, anchor, 0.5, 0.25, [(0.25, 2, message)], [torch.tensor([2.0])])
    >>> message, anchor, z
    (tensor([0.5000]), tensor([12.]), tensor([12.]))
    """
    fill_messages(z, anchor, before, messages)
    add_messages(z, anchor, after, messages, arrived)


def debias(z: Tensor, anchor: Tensor, weight: float) -> None:
    r"""De-bias a step without an exchange, in place: :math:`z = a = a + (z - a)/w`.

    >>> z = torch.tensor([3.0])
    >>> debias(z, torch.tensor([2.0]), weight=0.5)
    >>> z
    tensor([4.])
    """
    for z_, a in cache_blocks(z, anchor):
        _settle(numerator(z_, a, weight), weight, z_, a)


def _settle(x: Tensor, weight: float, z: Tensor, anchor: Tensor) -> None:
    """Write x/w to the anchor and, rounded to its dtype, to the model."""
    torch.mul(x, 1.0 / weight, out=anchor)
    z.copy_(anchor)


def sum_messages(messages: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of messages in ``dtype``, added in the order given.

    >>> sum_messages([torch.ones(1).bfloat16(), torch.ones(1)], torch.float32)
    tensor([2.])
    """
    result = messages[0].to(dtype)
    for message in messages[1:]:
        result = result + message
    return result


def _less(x: Tensor, messages: Messages, outs: Sequence[Tensor]) -> Tensor:
    for (_, receivers, _), out in zip(messages, outs, strict=True):
        x = torch.sub(x, out, alpha=receivers)
    return x
