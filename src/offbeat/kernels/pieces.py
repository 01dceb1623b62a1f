"""Push-sum passes over a model whose layers lie apart, layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

import offbeat.functional as functional
from offbeat.functional import all_finite
from offbeat.functional.push_sum import Messages


class PushSumPasses(NamedTuple):
    """Functions that read and write the parameters in a push-sum exchange.

    They take the parameters as flat pieces, which lie one after the other in the anchor and in
    messages; otherwise as :mod:`offbeat.functional.push_sum` describes them. Those that fill
    messages return whether all parameters are finite: if not, nothing or a part is written.
    """

    fill_messages: Callable[[Sequence[Tensor], Tensor | None, float, Messages], bool]
    add_messages: Callable[
        [Sequence[Tensor], Tensor | None, float, Messages, Sequence[Tensor]], None
    ]
    fill_and_add: Callable[
        [Sequence[Tensor], Tensor | None, float, float, Messages, Sequence[Tensor]], bool
    ]


def fill_messages(
    zs: Sequence[Tensor], anchor: Tensor | None, weight: float, messages: Messages
) -> bool:
    """Fill the messages of one exchange, as :func:`offbeat.functional.fill_messages` does.

    >>> import torch
    >>> z, message = [torch.tensor([3.0]), torch.tensor([5.0])], torch.empty(2)
    >>> fill_messages(z, None, 1.0, [(0.5, 1, message)])
    True
    >>> message
    tensor([1.5000, 2.5000])
    """
    if not all_finite(zs):
        return False
    for z, part in _parts(zs):
        functional.fill_messages(z, _of(anchor, part), weight, _of_all(messages, part))
    return True


def add_messages(
    zs: Sequence[Tensor],
    anchor: Tensor | None,
    weight: float,
    sent: Messages,
    arrived: Sequence[Tensor],
) -> None:
    """Add the messages that have arrived, as :func:`offbeat.functional.add_messages` does."""
    for z, part in _parts(zs):
        received = [message[part] for message in arrived]
        functional.add_messages(z, _of(anchor, part), weight, _of_all(sent, part), received)


def fill_and_add(
    zs: Sequence[Tensor],
    anchor: Tensor | None,
    before: float,
    after: float,
    messages: Messages,
    arrived: Sequence[Tensor],
) -> bool:
    """Do both, as :func:`offbeat.functional.fill_and_add` does."""
    if not all_finite(zs):
        return False
    for z, part in _parts(zs):
        received, sent = [message[part] for message in arrived], _of_all(messages, part)
        functional.fill_and_add(z, _of(anchor, part), before, after, sent, received)
    return True


def _parts(zs: Sequence[Tensor]) -> Iterator[tuple[Tensor, slice]]:
    start = 0
    for z in zs:
        yield z, slice(start, start + z.numel())
        start += z.numel()


def _of(anchor: Tensor | None, part: slice) -> Tensor | None:
    return None if anchor is None else anchor[part]


def _of_all(messages: Messages, part: slice) -> Messages:
    return [(share, receivers, message[part]) for share, receivers, message in messages]


IN_TORCH = PushSumPasses(fill_messages, add_messages, fill_and_add)
