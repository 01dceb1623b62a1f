"""Flat tensors with a view for each parameter."""

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offbeat.exchange.engine.dot_grad import stored
from offbeat.functional import Layout
from offbeat.functional.packing import Place
from offbeat.platform.device import zeros_beside
from offbeat.platform.privates import users_of_memory

References = tuple[list[int], int]  # to each view, and to the memory


class Flat:
    """Flat tensor (n), its views in the shapes of the parameters, and the rest behind them.

    A view may become a ``.grad``, which the script may keep after it has cleared ``.grad``.
    """

    def __init__(self, whole: Tensor, places: Mapping[str, Place], end: int) -> None:
        self.whole, self.rest, self._places = whole, whole[end:], places
        # .data: a view counts the writes to its base as its own, and we ask each for its own.
        self.views = {
            name: whole.as_strided(place.shape, place.strides, place.offset).data
            for name, place in places.items()
        }
        self._unshared = self._references()  # of this object alone

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Tensor],
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | None = None,
        rest: int = 0,
    ) -> "Flat":
        """Allocate zeros, laid out in the order of ``names``, and ``rest`` entries behind them."""
        # With the strides that autograd gives a gradient.
        layout = Layout.of({name: parameters[name] for name in names})
        (end,), home = layout.numels, parameters[names[0]].device
        whole = zeros_beside(home, end + rest, dtype, device or home)
        return cls(whole, layout.places, end)

    def unless_kept(self, parameters: Mapping[str, Tensor], also_grad: bool = False) -> "Flat":
        """Return this memory, to be written again, or new memory if the script refers to it."""
        # A tensor still in .grad does not count unless also_grad, or of a parameter that was frozen
        # since: plain torch changes the others in place, too.
        is_grad = any(
            stored(parameters[name]) is view and (also_grad or not parameters[name].requires_grad)
            for name, view in self.views.items()
        )
        if not is_grad and not self._is_kept(parameters):
            return self
        end = self.whole.numel() - self.rest.numel()
        whole = torch.zeros_like(self.whole, pin_memory=self.whole.is_pinned())
        return Flat(whole, self._places, end)

    def release(self) -> None:
        """Give the memory back; the views stay what they are, without content."""
        self.whole.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate what was released, with any content."""
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0:  # others may be arrays' too, which cannot be resized
            storage.resize_(self.whole.nbytes)

    def _is_kept(self, parameters: Mapping[str, Tensor]) -> bool:
        now = views, memory = self._references()
        if now == self._unshared:
            return False
        own_views, own_memory = self._unshared
        is_ours = [stored(parameters[name]) is view for name, view in self.views.items()]
        shared = zip(views, own_views, is_ours, strict=True)
        return any(count > own and not ours for count, own, ours in shared) or (
            memory > own_memory and not all(is_ours)
        )

    def _references(self) -> References:
        # Who keeps .grad has our own view; a slice or a detach() of it refers to its memory.
        memory = users_of_memory(self.whole)
        return [sys.getrefcount(view) for view in self.views.values()], memory
