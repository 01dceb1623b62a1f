"""Recording of when each gradient is ready, and of the peak of memory: for a profile."""

import resource
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.platform.device import peak_memory, wait_for_stream

GRADIENTS_VARIABLE = "OFFBEAT_TELEMETRY_GRADIENTS"  # environment variable: not empty to record


class GradientTimes:
    """Notes when each gradient was accumulated last, by a hook on every parameter."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._times: dict[str, float] = {}
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._sizes = {
            name: [parameter.numel(), str(parameter.dtype).removeprefix("torch.")]
            for name, parameter in parameters.items()
        }
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, parameter in parameters.items()
        ]

    def take(self, since: float) -> dict[str, Any]:
        """Return sizes, times of this step in seconds after ``since``, peak memory and device."""
        ready = {name: moment - since for name, moment in self._times.items()}
        self._times.clear()
        found = {"parameters": self._sizes, "ready": ready, "memory": self._peak()}
        return {**found, "device": self._device.type}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, _: Tensor) -> None:
        wait_for_stream(self._device)  # a hook runs when kernels are launched, not when they end
        self._times[name] = time.perf_counter()

    def _peak(self) -> int:
        if self._device.type != "cpu":
            return peak_memory(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
