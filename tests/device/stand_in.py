"""An accelerator that does not exist: tensors that claim to be on it, with real contents.

A tensor of the device wraps one of the host. Every operation on it comes to :func:`operate`, which
notes what an accelerator would refuse or make the host wait for, and then computes on the host. So
results can be compared, and Gloo carries the messages.

Nothing is raised: torch (2.13) aborts the process if Python raises in a backward on such a device.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Work
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import offbeat.testing.thread_world

NAME = "standin"
PACKAGE = str(Path(offbeat.__file__).parent)
TESTING = offbeat.testing.thread_world.__file__  # calls the test's own code
aten = torch.ops.aten

MIXED = "tensors on the host and on the device"

# The host must know a value, or how many there are, before it can go on.
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
}
aranges = (aten.arange.default, aten.arange.start, aten.arange.start_step)
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}


class DeviceTensor(torch.Tensor):
    """Claims to be on the device; ``host`` holds its contents."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "DeviceTensor":
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        self.host = host
        return self

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return operate(operation, args, kwargs or {})

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        synchronizations.note("numpy")
        return self.host.numpy()

    def tolist(self) -> Any:
        synchronizations.note("tolist")
        return self.host.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()


class Synchronizations:
    """Counts what would make the host wait, by (place in offbeat, operation), while switched on."""

    def __init__(self) -> None:
        self.is_on = False
        self.found: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def note(self, operation: object) -> None:
        """Count an operation at the innermost line of offbeat that leads to it."""
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        place = "the script"
        if frame is not None and frame.f_code.co_filename != TESTING:
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE).with_suffix("")
            place = f"{file.as_posix()}:{frame.f_code.co_qualname}"
        with self._lock:
            if self.is_on:
                self.found[place, str(operation)] += 1


synchronizations = Synchronizations()


def install() -> None:
    """Register the device; before the first backward of a process, and for good."""
    _setup_privateuseone_for_python_backend(NAME)
    kernels = torch.library.Library("aten", "IMPL")
    # arange resizes what it fills, which a tensor that wraps another cannot follow.
    for operation in (aten.empty.memory_format, aten.empty_strided.default, *aranges):
        kernels.impl(operation, _factory(operation), "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")  # of torch.tensor(..., device=)
    install.kernels = kernels  # they would go with it
    torch.accelerator.current_stream = lambda device=None: _Stream()
    torch.Event = _Event
    # Threads that make the first backward of a process at once abort it: torch 2.13.
    torch.ones(1, device=NAME).requires_grad_().square().backward()


def operate(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the host what was asked of the device."""
    tensors = [t for t in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(t, torch.Tensor)]
    ours = {id(t.host): t for t in tensors if isinstance(t, DeviceTensor)}
    # As on CUDA, one number of the host goes along with the launch.
    on_host = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim()]
    device = torch.device(kwargs.get("device") or torch.device(NAME, 0))
    if operation in COPIES:
        crosses = bool(on_host) or device.type != NAME
        if crosses and not kwargs.get("non_blocking") and True not in args[2:]:
            synchronizations.note(operation)
    elif on_host and ours:
        synchronizations.note(MIXED)
    elif operation in READS or _has_mask(operation, tensors):
        synchronizations.note(operation)
    hosts, named = pytree.tree_map_only(DeviceTensor, lambda t: t.host, (args, kwargs))
    if "device" in named:
        named["device"] = torch.device("cpu")
    out = operation(*hosts, **named)
    if device.type != NAME:
        return out
    if operation.namespace == "c10d" and joint.works is not None:
        joint.works += [Work.unbox(part) for part in pytree.tree_leaves(out) if _is_work(part)]
    return pytree.tree_map_only(
        torch.Tensor, lambda t: ours[id(t)] if id(t) in ours else DeviceTensor(t), out
    )


def coalesced(process_group: object, device: object, launch: Callable[[], object]) -> "_Works":
    """What :func:`offbeat.platform.process_group.coalesced` does, on the device."""
    joint.works = works = []
    launch()
    joint.works = None
    return _Works(works)


class _Works:
    """One work for all messages of a joint launch."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _is_work(part: object) -> bool:
    return not isinstance(part, torch.Tensor)


class _Joint(threading.local):
    works: list[Work] | None = None


joint = _Joint()  # what this thread launches jointly


def _has_mask(operation: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an index is a mask, whose entries are counted first."""
    is_index = operation in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
    return is_index and any(t.dtype is torch.bool for t in tensors[1:])


def _factory(operation: Any) -> Callable[..., DeviceTensor]:
    def make(*args: Any, **kwargs: Any) -> DeviceTensor:
        return DeviceTensor(operation(*args, **{**kwargs, "device": "cpu", "pin_memory": None}))

    return make


def _copy_from(source: torch.Tensor, out: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    operate(aten.copy_.default, (out, source), {"non_blocking": non_blocking})
    return out


class _Stream:
    """Every operation of the device has ended when it returns."""

    def synchronize(self) -> None:
        synchronizations.note("synchronize")


class _Event(_Stream):
    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, stream: _Stream) -> None:
        pass
