"""The buffers of the first rank, copied to the others whenever gradients are exchanged."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from offbeat.exchange import BoundGradients, Site
from offbeat.exchange.interface import GradientExchange
from offbeat.functional import Layout, pack
from offbeat.platform.privates import NormBase
from offbeat.transport.collectives import broadcast


@final
class BufferBroadcast:
    """Copies the buffers of the attach from the first member of a slot's group to the others.

    One that is not persistent and changes its shape or dtype is a cache, which each rank keeps; so
    is one that the first member has so changed, of which a flag in its message tells.
    """

    def __init__(self, site: Site, kinds: Mapping[str, Tensor]) -> None:
        """Allocate memory for buffers of these ``kinds``, which are equal on all members."""
        # The group of a sharded model joins the ranks that hold the same shards.
        group = site.group if site.shards is None else site.control
        assert group is not None, "a slot alone in its group is disabled"
        self._commit = site.commit
        self._group, self._homes = group, dict[str, tuple[nn.Module, str]]()
        for name in kinds:
            path, _, key = name.rpartition(".")
            self._homes[name] = site.model.get_submodule(path), key
        self._caches = [name for name, home in self._homes.items() if _may_change(*home)]
        like = next((kinds[name] for name in self._caches), torch.empty(0, device="meta"))
        # Flags beside the first cache, in its dtype: no message of their own.
        flags = {"": like.new_empty(len(self._caches))} if self._caches else {}
        layout = Layout.of({**kinds, **flags})
        self._flat = layout.empty(site.device)
        self._views = layout.views(self._flat)
        self._sent = [*self._views.pop("").unbind()] if flags else []

    @classmethod
    def beside(
        cls, slot: BoundGradients, exchange: GradientExchange | None, kinds: Mapping[str, Tensor]
    ) -> "BufferBroadcast | None":
        """Return the copy of buffers that goes with the ``exchange`` in ``slot``, if one does."""
        if exchange is None or slot.site is None:
            return None
        chosen = exchange.broadcast_buffers
        is_wanted = exchange.over == "world" if chosen is None else chosen
        return cls(slot.site, kinds) if is_wanted and kinds else None

    def fault(self) -> str | None:
        """Return why buffers of this rank cannot be copied, or None."""
        found = self._found()
        for name, (module, key) in self._homes.items():
            if name not in found and not _may_change(module, key):
                return (
                    f"buffer {name!r} was removed, resized or cast after replicate(), and those of "
                    "the first rank are broadcast; call detach() and replicate() again, or leave "
                    "buffers to their ranks by ddp(broadcast_buffers=False)"
                )
        return None

    def copy(self) -> None:
        """Copy the buffers; all members call."""
        found = self._found()
        if self._group.rank == 0:
            pack((self._views[name] for name in found), found.values())
            for name, flag in zip(self._caches, self._sent, strict=True):
                flag.fill_(name in found)
        for handle in [broadcast(flat, 0, self._group) for flat in self._flat if len(flat)]:
            handle.wait()
        self._commit(0)
        for name, flag in zip(self._caches, self._sent, strict=True):
            if name in found:  # a choice on the device, for which the host does not wait
                view = self._views[name]
                view.copy_(torch.where(flag != 0, view, found[name]))
        pack(found.values(), (self._views[name] for name in found))

    def _found(self) -> dict[str, Tensor]:
        """Return the buffers that still have the shape and dtype of the attach."""
        found = {}
        for name, (module, key) in self._homes.items():
            buffer, view = module._buffers.get(key), self._views[name]
            if buffer is not None and (buffer.shape, buffer.dtype) == (view.shape, view.dtype):
                # Normalization saves its statistics for a backward that may be still to come, but
                # does not read them in training: a write that autograd counts would be an error.
                found[name] = buffer.data if isinstance(module, NormBase) else buffer
        return found


def _may_change(module: nn.Module, key: str) -> bool:
    return key in module._non_persistent_buffers_set
