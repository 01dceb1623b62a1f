"""The profile of a training step on one rank: measured, or written by hand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from offbeat.plan.speeds import Speeds


@final
@dataclass(frozen=True)
class Parameter:
    """A trainable parameter: its size, and when its gradient is ready.

    ``ready`` counts seconds from the start of backward.
    """

    name: str
    numel: int
    dtype: str = "float32"
    ready: float = 0.0


@final
@dataclass(frozen=True)
class Profile:
    """What a plan knows of a step of one rank alone; times are means in seconds.

    ``forward`` begins with the step and includes loading of data; ``backward`` ends with the last
    gradient; ``optimizer`` is the rest of the step. ``parameters`` are in the order of the model.
    ``spread`` holds the times of single steps over their mean, ``memory`` the peak in bytes, None
    if unknown. ``speeds`` are those of passes over memory. ``device`` is the kind of device, such
    as "cpu", on which it was measured, None if unknown.

    >>> layers = [Parameter("w", 10), Parameter("b", 30)]
    >>> profile = Profile.by_size(layers, 1.0, 2.0, 0.1, Speeds.of_bandwidth(1e10))
    >>> profile.order, profile.parameters[0].ready
    (('b', 'w'), 2.0)
    """

    parameters: tuple[Parameter, ...]
    forward: float
    backward: float
    optimizer: float
    speeds: Speeds
    spread: tuple[float, ...] = ()
    memory: int | None = None
    device: str | None = None

    @classmethod
    def by_size(
        cls,
        parameters: Sequence[Parameter],
        forward: float,
        backward: float,
        optimizer: float,
        speeds: Speeds,
    ) -> "Profile":
        """Build a profile in which a gradient takes time in proportion to its size.

        Backward goes through the parameters from the last to the first.
        """
        total, done, timed = sum(p.numel for p in parameters), 0, []
        for parameter in reversed(parameters):
            done += parameter.numel
            timed.append(replace(parameter, ready=backward * done / total))
        return cls(tuple(reversed(timed)), forward, backward, optimizer, speeds)

    @property
    def compute(self) -> float:
        """Seconds of a step without any exchange."""
        return self.forward + self.backward + self.optimizer

    @property
    def numel(self) -> int:
        """The number of trainable parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def nbytes(self) -> int:
        """The bytes of the trainable parameters."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors without memory, in place of the parameters, by name."""
        return {
            p.name: torch.empty(p.numel, dtype=getattr(torch, p.dtype), device="meta")
            for p in self.parameters
        }

    @cached_property
    def ready(self) -> Mapping[str, float]:
        """When each gradient is ready, in seconds from the start of backward."""
        return {parameter.name: parameter.ready for parameter in self.parameters}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The parameters in the order in which their gradients become ready."""
        names = [parameter.name for parameter in self.parameters][::-1]
        return tuple(sorted(names, key=lambda name: self.ready[name]))

    def on_device(self, factor: float) -> "Profile":
        """Return the profile of a device that computes ``factor`` times as fast."""
        return replace(
            self,
            parameters=tuple(replace(p, ready=p.ready / factor) for p in self.parameters),
            forward=self.forward / factor,
            backward=self.backward / factor,
            optimizer=self.optimizer / factor,
            speeds=self.speeds.faster(factor),
        )

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
