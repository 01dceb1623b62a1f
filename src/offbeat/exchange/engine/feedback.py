"""What error feedback remembers, which goes back when a gradient is discarded."""

from collections.abc import Collection, Mapping, Sequence
from typing import final

from torch import Tensor

from offbeat.exchange.engine.flat import Flat
from offbeat.functional import accumulation_dtype


@final
class Feedback:
    """Residuals, or velocities, of the gradients of a message, in flat tensors that alternate.

    An exchange reads :attr:`latest` and writes :attr:`next`. A gradient that is discarded leaves
    what was left when the script last :attr:`used` one. Two tensors, and a third once several
    exchanges come between two uses.
    """

    def __init__(self, parameters: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self._arguments = parameters, names, accumulation_dtype(parameters[names[0]].dtype)
        self._flats = [Flat.of(*self._arguments) for _ in range(2)]
        self._used = self._latest = self._flats[0]
        self._next: Flat | None = self._flats[1]

    @property
    def latest(self) -> Mapping[str, Tensor]:
        """After the last exchange, by parameter."""
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

    @property
    def is_zero(self) -> bool:
        """Whether nothing is left after the last exchange."""
        return not self._latest.whole.any()

    def commit(self, unused: Collection[str] = ()) -> None:
        """Keep what this exchange has left; nothing changes for parameters that were ``unused``."""
        for name in unused:
            self.next.views[name].copy_(self.latest[name])
        self._latest, self._next = self.next, None

    def resolve(self, used: Collection[str], discarded: Collection[str], *, is_last: bool) -> None:
        """Keep what gradients left that were used, and go back to before those discarded.

        ``is_last``: whether all others are used, or had nothing in the last exchange.
        """
        for name in discarded:
            self.latest[name].copy_(self.used[name])
        if is_last:
            self._used, self._next = self._latest, None
            return
        for name in used:
            self._used.views[name].copy_(self.latest[name])
