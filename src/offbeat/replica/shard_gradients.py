"""The gradients of parameters that FSDP2 has sharded, as those of the shards."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class ShardGradients:
    """Connects the gradients of sharded parameters with those of the shards that are exchanged.

    An exchange reads and writes ``.grad`` of plain tensors, which are the shards here; FSDP2 and
    optimizers those of the parameters. Nothing is done for parameters that are not sharded.
    """

    def __init__(self, parameters: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Connect each of ``parameters`` with what this rank holds of it."""
        pairs = {name: (parameters[name], part) for name, part in held.items()}
        self._pairs = {name: (p, part) for name, (p, part) in pairs.items() if part is not p}

    def take(self, name: str) -> None:
        """Show the gradient of a parameter as that of its shard."""
        if name in self._pairs:
            parameter, part = self._pairs[name]
            part.grad = None if parameter.grad is None else _local_data(parameter.grad)

    def take_all(self) -> None:
        """Show the gradients of all parameters."""
        for name in self._pairs:
            self.take(name)

    def give_all(self) -> None:
        """Write the gradients of the shards, which an exchange has combined, to the parameters."""
        for parameter, part in self._pairs.values():
            if part.grad is not None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _local_data(parameter.grad).copy_(part.grad)
            part.grad = None  # a view of the buffer of an exchange


def _local_data(tensor: Any) -> Tensor:
    data: Tensor = tensor.to_local().detach()
    return data
