"""Whether a tensor is on the host, and waits for an accelerator: CUDA, XPU, NPU, MPS alike.

Everything that offbeat asks of a device beside its tensors is asked here, of ``torch.accelerator``
(torch 2.6). The rest of the package must not name a kind of accelerator.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def is_on_host(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is in the memory of the host; its operations are then immediate.

    >>> is_on_host(torch.zeros(1)), is_on_host(torch.zeros(1, device="meta"))
    (True, False)
    """
    return tensor.device.type == "cpu"


def host_array(tensor: Tensor) -> Any:
    """Return a view of NumPy's of a tensor on the host, else ``tensor``: for arithmetic of both.

    Just after a wait, an operation of torch takes 20 us or more.

    >>> host_array(torch.ones(2)) * 2
    array([2., 2.], dtype=float32)
    """
    return tensor.numpy() if is_on_host(tensor) else tensor


def current_accelerator() -> torch.device:
    """Return the accelerator on which this thread works, with its index."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "asked only for groups with a backend for an accelerator"
    return torch.device(kind.type, torch.accelerator.current_device_index())


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make ``device`` the current one of its kind inside a ``with`` block."""
    return torch.accelerator.device_index(None if device.type == "cpu" else device.index)


def wait_for_stream(device: torch.device) -> None:
    """Block the host until all work on this thread's stream of ``device`` has ended.

    >>> wait_for_stream(torch.device("cpu"))
    """
    if has_streams(device):
        torch.accelerator.current_stream(device).synchronize()


def event_after(tensor: Tensor) -> torch.Event | None:
    """Return an event that follows all work on this thread's stream, or None on the host.

    >>> event_after(torch.zeros(1)) is None
    True
    """
    if not has_streams(tensor.device):
        return None
    event = torch.Event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return event


def number_on_host(like: Tensor) -> Tensor:
    """Allocate one number of the host, to which the device of ``like`` copies without a wait."""
    return torch.empty(1, dtype=like.dtype, device="cpu", pin_memory=has_streams(like.device))


def zeros_beside(
    home: torch.device, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate (numel,) zeros on ``device``, to which ``home`` copies at full speed."""
    # Copies from an accelerator to pageable memory of the host are slower, and it waits for each.
    if device.type == "cpu" and has_streams(home):
        with contextlib.suppress(RuntimeError):  # it has no such memory, or too little
            return torch.zeros(numel, dtype=dtype, device=device, pin_memory=True)
    return torch.zeros(numel, dtype=dtype, device=device)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of bytes that tensors on an accelerator have taken."""
    return torch.accelerator.max_memory_allocated(device)


def has_streams(device: torch.device) -> bool:
    """Whether operations on ``device`` go on after they return; not on the host, nor on "meta"."""
    return device.type not in ("cpu", "meta")


def accelerators() -> list[str]:
    """Return the kind and index of each accelerator of this machine."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count()
    return [] if kind is None else [f"{kind.type}:{index}" for index in range(count)]
