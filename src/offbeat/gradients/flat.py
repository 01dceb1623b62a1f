"""Flat tensors with a view for each parameter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.exchange import Site
from offbeat.gradients.bucket import like


@dataclass(eq=False)
class Flat:
    """Flat tensor (n) and its views, in the shapes of the parameters."""

    whole: Tensor
    views: dict[str, Tensor]

    @classmethod
    def of(cls, site: Site, names: Sequence[str], dtype: torch.dtype) -> "Flat":
        """Allocate zeros, laid out in the order of ``names``."""
        parameters = [site.parameters[name] for name in names]
        sizes = [parameter.numel() for parameter in parameters]
        whole = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
        parts = map(like, whole.split(sizes), parameters)
        # .data: a view counts the writes to its base as its own, and we ask each for its own.
        return cls(whole, {name: part.data for name, part in zip(names, parts, strict=True)})
