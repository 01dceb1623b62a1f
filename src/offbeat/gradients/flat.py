"""Flat tensors with a view for each parameter."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.gradients.dot_grad import stored

Shape = tuple[Sequence[int], Sequence[int], int]  # shape, strides and offset
References = tuple[list[int], int]  # to each view, and to the memory


@dataclass(eq=False)
class Flat:
    """Flat tensor (n), its views in the shapes of the parameters, and the rest behind them.

    A view may become a ``.grad``, which the script may keep after it has cleared ``.grad``.
    """

    whole: Tensor
    views: dict[str, Tensor]
    rest: Tensor
    _unshared: References = field(init=False)

    def __post_init__(self) -> None:
        """Count the references of this object alone."""
        self._unshared = self._references()

    @classmethod
    def of(
        cls,
        site: Site,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | None = None,
        rest: int = 0,
    ) -> "Flat":
        """Allocate zeros, laid out in the order of ``names``, and ``rest`` entries behind them."""
        shapes, start = dict[str, Shape](), 0
        for name in names:
            parameter = site.parameters[name]
            # Strides as autograd lays out a gradient.
            strides = torch.empty_like(parameter, device="meta").stride()
            shapes[name] = (parameter.shape, strides, start)
            start += parameter.numel()
        device = device or site.parameters[names[0]].device
        return cls._allocate(torch.zeros(start + rest, dtype=dtype, device=device), shapes, start)

    @classmethod
    def _allocate(
        cls,
        whole: Tensor,
        shapes: Mapping[str, Shape],
        end: int,
    ) -> "Flat":
        # .data: a view counts the writes to its base as its own, and we ask each for its own.
        views = {name: whole.as_strided(*shape).data for name, shape in shapes.items()}
        return cls(whole, views, whole[end:])

    def unless_kept(self, parameters: Mapping[str, Tensor]) -> "Flat":
        """Return this memory, to be written again, or new memory if the script refers to it.

        A tensor still in ``.grad`` does not count: plain torch changes it in place, too.
        """
        if not self._is_kept(parameters):
            return self
        shapes = {
            name: (view.shape, view.stride(), int(view.storage_offset()))
            for name, view in self.views.items()
        }
        end = self.whole.numel() - self.rest.numel()
        return self._allocate(torch.zeros_like(self.whole), shapes, end)

    def release(self) -> None:
        """Give the memory back; the views stay what they are, without content."""
        self.whole.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate what was released, with any content."""
        storage = self.whole.untyped_storage()
        if storage.nbytes() == 0:  # others may be arrays' too, which cannot be resized
            storage.resize_(self.whole.nbytes)

    def _is_kept(self, parameters: Mapping[str, Tensor]) -> bool:
        views, memory = self._references()
        own_views, own_memory = self._unshared
        if views == own_views and memory == own_memory:
            return False
        shared = zip(self.views.items(), views, own_views, strict=True)
        return any(
            count > own and stored(parameters[name]) is not view
            for (name, view), count, own in shared
        ) or (
            memory > own_memory
            and any(stored(parameters[name]) is not view for name, view in self.views.items())
        )

    def _references(self) -> References:
        # Who keeps .grad has our own view; a slice or a detach() of it refers to its memory.
        memory = torch._C._storage_Use_Count(self.whole.untyped_storage()._cdata)
        return [sys.getrefcount(view) for view in self.views.values()], memory
