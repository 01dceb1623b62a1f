"""What error feedback remembers, which goes back when a gradient is discarded."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.gradients.flat import Flat


class Feedback(ABC):
    """Residuals, or velocities, of the gradients of a message.

    They exist twice: as they are after the last exchange, and as they were when the script last
    used a gradient of the exchange. A gradient that is discarded leaves the second.
    """

    @property
    @abstractmethod
    def latest(self) -> Mapping[str, Tensor]:
        """After the last exchange; by parameter, none for parameters that have none."""

    @property
    @abstractmethod
    def used(self) -> Mapping[str, Tensor]:
        """After the last exchange whose gradient was used."""

    @abstractmethod
    def remember(self, name: str, kept: Tensor) -> None:
        """Start from what another message, or an earlier run, has kept of ``name``."""

    @abstractmethod
    def settle(self, used: Collection[str], discarded: Collection[str], *, is_last: bool) -> None:
        """Keep what gradients left that were used, and go back to before those discarded.

        ``is_last``: whether all others are used, or had nothing in the last exchange.
        """


@final
class FlatFeedback(Feedback):
    """Flat tensors that alternate: an exchange reads :attr:`latest` and writes :attr:`next`.

    Two, and a third once several exchanges come between two uses.
    """

    def __init__(self, site: Site, names: Sequence[str], dtype: torch.dtype) -> None:
        self._arguments = site, names, dtype
        self._flats = [Flat.of(site, names, dtype) for _ in range(2)]
        self._used = self._latest = self._flats[0]
        self._next: Flat | None = self._flats[1]

    @property
    def latest(self) -> Mapping[str, Tensor]:
        """After the last exchange."""
        return self._latest.views

    @property
    def used(self) -> Mapping[str, Tensor]:
        """After the last exchange whose gradient was used."""
        return self._used.views

    @property
    def next(self) -> Flat:
        """The memory for what this exchange leaves."""
        if self._next is None:
            free = [flat for flat in self._flats if flat not in (self._used, self._latest)]
            if not free:
                free.append(Flat.of(*self._arguments))
                self._flats += free
            self._next = free[0]
        return self._next

    def remember(self, name: str, kept: Tensor) -> None:
        """Copy what was kept of ``name``."""
        self.latest[name].copy_(kept)

    def skip(self, names: Collection[str]) -> None:
        """Leave those of ``names`` as they are: they had no gradient on any rank."""
        for name in names:
            self.next.views[name].copy_(self.latest[name])

    def commit(self) -> None:
        """Keep what this exchange has left."""
        self._latest, self._next = self.next, None

    def settle(self, used: Collection[str], discarded: Collection[str], *, is_last: bool) -> None:
        """Copy the fewer; where all are used, nothing."""
        for name in discarded:
            self.latest[name].copy_(self.used[name])
        if is_last:
            self._used, self._next = self._latest, None
            return
        for name in used:
            self._used.views[name].copy_(self.latest[name])


@final
class LayerFeedback(Feedback):
    """A tensor for each layer that needs one; none is changed in place."""

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        self._used, self._latest = dict(start), dict(start)

    @property
    def latest(self) -> Mapping[str, Tensor]:
        """After the last exchange."""
        return self._latest

    @property
    def used(self) -> Mapping[str, Tensor]:
        """After the last exchange whose gradient was used."""
        return self._used

    def remember(self, name: str, kept: Tensor) -> None:
        """Take over what was kept of ``name``, unless it is zero."""
        if kept.any():
            before = self._latest.get(name, kept)
            self._used[name] = self._latest[name] = kept.to(before.device)

    def commit(self, left: Mapping[str, Tensor]) -> None:
        """Keep what this exchange has left, of all layers that now have any."""
        self._latest = dict(left)

    def settle(self, used: Collection[str], discarded: Collection[str], *, is_last: bool) -> None:
        """Exchange references to tensors."""
        _copy(discarded, self._used, self._latest)
        _copy(
            self._latest.keys() | self._used.keys() if is_last else used, self._latest, self._used
        )


def _copy(names: Collection[str], source: Mapping[str, Tensor], to: dict[str, Tensor]) -> None:
    for name in names:
        if name in source:
            to[name] = source[name]
        else:
            to.pop(name, None)
