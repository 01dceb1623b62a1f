"""Push-sum passes over a model whose layers lie apart, layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from offbeat import functional
from offbeat.functional.push_sum import Messages


class PushSumPasses(NamedTuple):
    """Functions that read and write the parameters in a push-sum exchange.

    They take the parameters as flat pieces, which lie one after the other in the anchor and in
    messages; otherwise as :mod:`offbeat.functional.push_sum` describes them.
    """

    fill_messages: Callable[[Sequence[Tensor], Tensor | None, float, Messages], None]
    add_messages: Callable[
        [Sequence[Tensor], Tensor | None, float, Messages, Sequence[Tensor]], None
    ]
    fill_and_add: Callable[
        [Sequence[Tensor], Tensor | None, float, float, Messages, Sequence[Tensor]], None
    ]


def piece_by_piece(fill: Any, add: Any, both: Any) -> PushSumPasses:
    """Return passes over many pieces, from the three functions for one piece.

    >>> import torch
    >>> z, message = [torch.tensor([3.0]), torch.tensor([5.0])], torch.empty(2)
    >>> IN_TORCH.fill_messages(z, None, 1.0, [(0.5, 1, message)])
    >>> message
    tensor([1.5000, 2.5000])
    """

    def fill_messages(
        zs: Sequence[Tensor], anchor: Tensor | None, weight: float, messages: Messages
    ) -> None:
        for z, part in _parts(zs):
            fill(z, _of(anchor, part), weight, _of_all(messages, part))

    def add_messages(
        zs: Sequence[Tensor],
        anchor: Tensor | None,
        weight: float,
        sent: Messages,
        arrived: Sequence[Tensor],
    ) -> None:
        for z, part in _parts(zs):
            received = [message[part] for message in arrived]
            add(z, _of(anchor, part), weight, _of_all(sent, part), received)

    def fill_and_add(
        zs: Sequence[Tensor],
        anchor: Tensor | None,
        before: float,
        after: float,
        messages: Messages,
        arrived: Sequence[Tensor],
    ) -> None:
        for z, part in _parts(zs):
            received = [message[part] for message in arrived]
            both(z, _of(anchor, part), before, after, _of_all(messages, part), received)

    return PushSumPasses(fill_messages, add_messages, fill_and_add)


def _parts(zs: Sequence[Tensor]) -> Iterator[tuple[Tensor, slice]]:
    start = 0
    for z in zs:
        yield z, slice(start, start + z.numel())
        start += z.numel()


def _of(anchor: Tensor | None, part: slice) -> Tensor | None:
    return None if anchor is None else anchor[part]


def _of_all(messages: Messages, part: slice) -> Messages:
    return [(share, receivers, message[part]) for share, receivers, message in messages]


IN_TORCH = piece_by_piece(
    functional.fill_messages, functional.add_messages, functional.fill_and_add
)
