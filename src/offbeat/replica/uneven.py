"""Batches that end on all ranks together, however many each one has."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Batch = TypeVar("Batch")
_END: Any = object()
_NONE: Any = object()


class Place(NamedTuple):
    """Where a rank is: its steps, who trains, how often that has changed, and since which step."""

    steps: int
    ranks: Sequence[int]
    changes: int
    since: int


@final
class Uneven(Generic[Batch]):
    """Iterates over the batches of this rank, then repeats one until all ranks are through.

    What a repeated batch computes counts for nothing: its gradients are zero, and a step on it has
    the weight 0. So the rank makes every call that the others make, and no other.

    Where all ranks know the number of their batches, they agree once at the beginning, and again
    after a loss or a join; otherwise by a small gather before each batch. Attributes are those of
    ``batches``. ``is_ahead``: the loop draws a batch before it has trained on the last one, and
    says by :meth:`begin` when it goes on to the next one.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        filler: Batch | None,
        parameters: Iterable[Tensor],
        run_out: Callable[[bool], None],
        gather: Callable[[str], list[str]],
        place: Callable[[], Place],
        is_ahead: bool = False,
    ) -> None:
        """Prepare; see :meth:`offbeat.Replica.uneven`."""
        self._batches, self._parameters, self._is_ahead = batches, [*parameters], is_ahead
        self._filler = _NONE if filler is None else filler
        self._run_out, self._gather, self._place = run_out, gather, place
        self._hooks: list[RemovableHandle] = []
        self._repeated: list[bool] = []  # whether a batch of this pass is a repeated one
        self._begun = 0  # batches of this pass on which training has begun
        self._trained_in = -1  # the step of the last one that is not
        self._most: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # of an object that is not made yet
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        """Return the largest number of batches of a rank; all ranks call first."""
        length = len(self._batches)  # type: ignore[arg-type]  # or a TypeError
        if self._most is None:
            self._most = self._agree(length)
        if self._most is None:
            raise TypeError("a rank does not know the number of its batches")
        return self._most

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches, then one of them again; all ranks begin together."""
        length, self._repeated, self._begun = self._length(), [], 0
        most, changes = self._agree(length), self._place().changes
        self._most, own, last = most, iter(self._batches), self._filler
        try:
            while most is None or len(self._repeated) < most:
                batch = next(own, _END)
                is_out = batch is _END
                if most is None and self._all_are_out(is_out, last is _NONE):
                    return
                last = last if is_out else batch
                self._repeated.append(is_out)
                if not self._is_ahead:
                    self.begin()
                yield self._filler if is_out and self._filler is not _NONE else last
                now = self._place()
                # Not before all have come to the step in which the first has found a loss. A rank
                # that is lost may have come back meanwhile.
                if now.changes != changes and now.steps > now.since:
                    trained = len(self._repeated)
                    own_left = None if length is None else max(0, length - trained)
                    changes, left = now.changes, self._agree(own_left, last is _NONE)
                    most = None if left is None else trained + left
        finally:
            if not self._is_ahead:
                self.end()

    def begin(self) -> None:
        """Note that the next backward is that of the next batch."""
        is_repeated, steps = self._repeated[self._begun], self._place().steps
        self._begun += 1
        if not is_repeated:
            self._trained_in = steps
        self.end()
        if is_repeated:
            self._hooks = [
                p.register_hook(torch.zeros_like) for p in self._parameters if p.requires_grad
            ]
        # A step may have several micro-batches, of which this rank had the first ones.
        self._run_out(is_repeated and steps != self._trained_in)

    def end(self) -> None:
        """Note that what comes counts again."""
        while self._hooks:
            self._hooks.pop().remove()
        self._run_out(False)

    def _length(self) -> int | None:
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except TypeError:
            return None

    def _agree(self, length: int | None, has_none: bool = True) -> int | None:
        """Return the most batches of a rank; None if one does not know them.

        ``has_none``: this rank has had none yet.
        """
        mine = "?" if length is None else str(length)
        if length == 0 and has_none and self._filler is _NONE:
            mine = "none"
        found = self._gather(mine)
        self._require_filler(found)
        if "?" in found:
            return None
        return max(0 if each == "none" else int(each) for each in found)

    def _all_are_out(self, is_out: bool, has_none: bool) -> bool:
        found = self._gather(("none" if has_none else "out") if is_out else "in")
        if "in" in found:
            self._require_filler(found)
        return "in" not in found

    def _require_filler(self, found: Sequence[str]) -> None:
        if "none" in found and {*found} != {"none"}:
            # One that is lost since is in what all have found, but not in the place.
            ranks = self._place().ranks
            rank = ranks[min(found.index("none"), len(ranks) - 1)]
            raise ValueError(
                f"rank {rank} has no batch to repeat while others train; pass one of the same form "
                "as filler= of uneven(), on that rank at least"
            )
