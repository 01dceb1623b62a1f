"""The parameters that the ranks of a node step in shares, and the norm of all their gradients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from offbeat.exchange import Exchanged, Site
from offbeat.exchange.engine.dot_grad import part_with_grad
from offbeat.transport.collectives import all_gather
from offbeat.transport.group import Group, message_device


@final
@dataclass(frozen=True, eq=False)
class Share:
    """What this rank steps: all parameters, or a part where ``site`` says who shares them."""

    model: Exchanged
    site: Site | None

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters that this rank steps, ignored ones last."""
        trained = self.model.trained
        if self.site is not None:
            owners, mine = self.site.owners(), self.site.world.local_rank
            trained = {name: p for name, p in trained.items() if owners[name] == mine}
        return [*trained.values(), *self.model.own]

    @property
    def _parts(self) -> dict[str, Tensor]:
        return {name: part_with_grad(p) for name, p in self.model.trained.items()}

    def norm(self, norm_type: float, shards: Site | None) -> Tensor:
        """Return the :func:`total_norm` of the gradients; of all ``shards``, each part once."""
        parts = self._parts
        counted, group = [*parts.values()], self.site.group if self.site else None
        if shards is not None:
            theirs = shards.replicated.theirs if shards.replicated is not None else ()
            counted = [p if p.numel() and n not in theirs else p.detach() for n, p in parts.items()]
            group = shards.shards
        return total_norm(counted, norm_type, group)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients that have this norm to at most ``max_norm``."""
        clip_grads_with_norm_(self._parts.values(), max_norm, norm)


def total_norm(parameters: Iterable[Tensor], norm_type: float, group: Group | None) -> Tensor:
    r"""Return the norm of all gradients; with a group, of those of all its members.

    .. math:: |g|_p = (\sum_r |g_r|_p^p)^{1/p}

    Equal on all members, bit for bit; a float32 (float64) scalar. One message of 8 bytes.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer(torch.tensor([3.0, 4.0])).backward()
    >>> total_norm(layer.parameters(), 2.0, None)
    tensor(5.)
    """
    held = [*parameters]
    found = [_entries(parameter.grad) for parameter in held if parameter.grad is not None]
    grads = [grad for grad in found if grad.numel()]  # torch has no maximum of nothing
    # A member without gradients would otherwise round the norm to float32, and clip by another one.
    norm = get_total_norm(grads, norm_type) if grads else held[0].new_zeros(())
    if group is not None and norm.dtype.itemsize == 2:
        norm = norm.float()  # 16 bits would be rounded twice
    if group is None:
        return norm
    mine = norm.to(message_device(group, norm.device), torch.float64).view(1)
    everyone = mine.new_empty(group.size)
    all_gather(everyone, mine, group).wait()
    whole: Tensor = torch.linalg.vector_norm(everyone, norm_type)
    return whole.to(norm)


def _entries(grad: Tensor) -> Tensor:
    """Return what may differ from zero: of a sparse gradient the values, each row once."""
    return grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
