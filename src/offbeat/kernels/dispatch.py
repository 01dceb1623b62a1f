"""Choice of the implementation of an operation: torch, or a kernel on a CPU or a GPU.

On a CPU kernels need numba, on a GPU Triton; where it is not installed torch does the same, and
nothing is said. Both are imported at the first use, since the import takes about a second.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

import offbeat.functional as functional
from offbeat.functional import GramAnalysis, Segment
from offbeat.functional.messages.narrowing import Narrow, narrow
from offbeat.functional.top_k import SMALL
from offbeat.kernels.pieces import IN_TORCH, PushSumPasses

Select = Callable[[Tensor, int], Tensor]  # (x, k): k indices into x
Narrowing = Callable[[Tensor, Tensor, Narrow], None]
BlockSelect = Callable[[Tensor, Sequence[tuple[int, int, int]]], Tensor]  # (x, [(start, stop, k)])


class AdasumPasses(NamedTuple):
    """Functions that read the vectors of all ranks in Adasum, and the analysis between them."""

    add_gram: Callable[[Tensor, Sequence[Segment], Tensor], None]
    analyze: Callable[[Tensor], GramAnalysis]
    combine_rows: Callable[[Tensor, Sequence[Segment], Tensor, Tensor], None]


def push_sum_passes(device: torch.device) -> PushSumPasses:
    """Return the fastest push-sum passes on ``device``; results differ by rounding only.

    These are those of :mod:`offbeat.kernels.push_sum` on a CPU with numba (1.2 ms for 3.2 million
    parameters and 16-bit messages), those of :mod:`offbeat.kernels.gpu.push_sum` on a GPU with
    Triton, and those of :mod:`offbeat.functional.push_sum` otherwise (7 ms).

    >>> push_sum_passes(torch.device("meta")) is IN_TORCH
    True
    """
    if device.type == "cpu" and _has_numba():
        from offbeat.kernels import push_sum

        return PushSumPasses(push_sum.fill_messages, push_sum.add_messages, push_sum.fill_and_add)
    if _has_triton(device):
        from offbeat.kernels.gpu import push_sum as on_gpu

        return PushSumPasses(on_gpu.fill_messages, on_gpu.add_messages, on_gpu.fill_and_add)
    return IN_TORCH


def adasum_passes(device: torch.device, compiled: bool) -> AdasumPasses:
    """Return the passes of Adasum in torch or, if ``compiled``, as kernels for ``device``.

    The caller decides, since all ranks must use the same (see :func:`machine_code`). Results
    differ only by the order of float64 sums.

    >>> adasum_passes(torch.device("cpu"), compiled=False).add_gram.__module__
    'offbeat.functional.adasum'
    """
    if not compiled:
        return AdasumPasses(functional.add_gram, functional.analyze, functional.combine_rows)
    if _has_triton(device):
        from offbeat.kernels.gpu import adasum as on_gpu

        return AdasumPasses(on_gpu.add_gram, functional.analyze, on_gpu.combine_rows)
    from offbeat.kernels import adasum

    return AdasumPasses(adasum.add_gram, adasum.analyze, adasum.combine_rows)


@cache
def machine_code(device: torch.device) -> str:
    """Identify the code of kernels on ``device``; ranks with equal strings round alike.

    The string holds numba's version, the processor's name and its instruction sets, or Triton's
    version and the architecture of the GPU; "" without kernels. The name alone is not sufficient:
    a virtual machine may disable wide vector instructions, and sums then run in another order.

    >>> machine_code(torch.device("meta"))
    ''
    """
    if _has_triton(device):
        import triton

        return f"{triton.__version__} {triton.runtime.driver.active.get_current_target()}"
    if device.type != "cpu" or not _has_numba():
        return ""
    import numba
    from llvmlite import binding

    features = binding.get_host_cpu_features().flatten()
    return f"{numba.__version__} {binding.get_host_cpu_name()} {features}"


def load_kernels(device: torch.device) -> None:
    """Import the kernels for ``device`` and call them, which takes up to a second, if compiled.

    For a run that changes its method: the first exchange of the next one would do so.

    >>> load_kernels(torch.device("meta"))  # which has none
    """
    if not machine_code(device):
        return
    x = torch.ones(64, dtype=torch.float32, device=device)
    out = torch.zeros(1, 2, 2, dtype=torch.float64, device=device)
    passes, near = push_sum_passes(device), adasum_passes(device, compiled=True)
    for message in (x.clone(), x.bfloat16()):  # each type is a kernel of its own
        passes.fill_messages([x], x.clone(), 0.5, [(0.25, 2, message)])
        passes.add_messages([x], x.clone(), 0.5, [], [message])
        passes.fill_and_add([x], x.clone(), 0.5, 0.5, [(0.25, 2, message)], [message.clone()])
    top_k_of_blocks(device)(x, [(0, 64, 8)])
    near.add_gram(x.view(2, 32), [Segment(0, 0, 32)], out)
    weights = near.analyze(out).weights
    near.combine_rows(x.view(2, 32), [Segment(0, 0, 32)], weights, torch.zeros_like(x[:32]))


def top_k_of_blocks(device: torch.device, exact: bool = False) -> BlockSelect:
    """Return the fastest top-k selection on ``device``; results differ in ties only.

    It takes a flat tensor x and the (start, stop, k) of each block, and returns indices into x,
    block after block. This is :func:`offbeat.kernels.top_k.scanned_blocks` on a CPU with numba, and
    :func:`offbeat.kernels.gpu.top_k.top_k_of_blocks` on a GPU with Triton; otherwise
    :func:`offbeat.functional.sampled_top_k`, or :func:`offbeat.functional.top_k` if ``exact``.

    >>> select = top_k_of_blocks(torch.device("cpu"))
    >>> select(torch.tensor([1.0, -3.0, 0.0, 2.0]), [(0, 2, 1), (2, 4, 1)])
    tensor([1, 3])
    """
    if device.type == "cpu" and _has_numba():
        from offbeat.kernels.top_k import scanned_blocks

        return scanned_blocks
    if _has_triton(device):
        return _on_gpu
    return partial(_of_runs, functional.top_k if exact else functional.sampled_top_k)


def each_block(select: Select) -> BlockSelect:
    """Apply a selection of the user's to every block of a flat tensor, and check what it returns.

    ``select(x, k)`` returns the indices (k,) of different entries of ``x`` (n,). Where an entry is
    not finite top-k selects instead, which includes that entry, so that it is noticed. Raises
    ``ValueError`` for anything else than k different indices of int64.

    >>> select = each_block(lambda x, k: torch.arange(k))
    >>> select(torch.tensor([1.0, -3.0, 0.0, torch.nan]), [(0, 2, 1), (2, 4, 1)])
    tensor([0, 3])
    """

    def selected(x: Tensor, k: int) -> Tensor:
        indices = select(x, k) if x.isfinite().all() else functional.top_k(x, k)
        fault = f"shape {tuple(indices.shape)} and {indices.dtype}, expected {(k,)} and torch.int64"
        if indices.shape == (k,) and indices.dtype == torch.int64:
            different = indices.unique()  # sorted
            if len(different) == k and different[0] >= 0 and different[-1] < len(x):
                return indices
            fault = f"{len(different)} different indices of [0, {len(x)}), expected {k}"
        raise ValueError(
            f"the selection returned indices of {fault}; return the indices of k different entries"
        )

    return lambda x, blocks: torch.cat([selected(x[i:j], k).add(i) for i, j, k in blocks])


def narrowing_on(device: torch.device) -> Narrowing:
    """Return the fastest cast to narrow messages on ``device``; the results are equal.

    This is :func:`offbeat.kernels.gpu.narrowing.narrow` on a GPU with Triton, and
    :func:`offbeat.functional.messages.narrowing.narrow` otherwise.

    >>> narrowing_on(torch.device("cpu")) is narrow
    True
    """
    if _has_triton(device):
        from offbeat.kernels.gpu import narrowing

        return narrowing.narrow
    return narrow


def _on_gpu(x: Tensor, blocks: Sequence[tuple[int, int, int]]) -> Tensor:
    """Select in all blocks at once; in small ones torch does it in fewer launches."""
    if x.dtype != torch.float32 or x.numel() < len(blocks) * SMALL:
        return _of_runs(functional.top_k, x, blocks)
    from offbeat.kernels.gpu.top_k import top_k_of_blocks

    return top_k_of_blocks(x, blocks)


def _of_runs(select: Select, x: Tensor, blocks: Sequence[tuple[int, int, int]]) -> Tensor:
    """Select in every block, and in one call in small ones of one size that follow each other."""
    found = []
    # A call for each of the thousands of chunks of a large layer would take seconds on a GPU.
    for _, run in groupby(enumerate(blocks), _run_of):
        (_, (start, stop, k)), *others = run
        if not others or stop - start >= SMALL:
            each = [(start, stop, k), *(block for _, block in others)]
            found += [select(x[i:j], k).add(i) for i, j, k in each]
            continue
        count, size = 1 + len(others), stop - start
        rows = x[start : start + count * size].view(count, size)
        starts = torch.arange(count, device=x.device) * size + start
        indices = rows.abs().topk(k, dim=1, sorted=False).indices
        found.append(indices.add_(starts.unsqueeze(1)).view(-1))
    return torch.cat(found)


def _run_of(numbered: tuple[int, tuple[int, int, int]]) -> tuple[int, int, int]:
    """Return what consecutive blocks have in common that follow each other in memory."""
    number, (start, stop, k) = numbered
    size = stop - start
    return start - number * size, size, k


def _has_numba() -> bool:
    return find_spec("numba") is not None


def _has_triton(device: torch.device) -> bool:
    """Whether Triton is installed, as it is with PyTorch for CUDA, and compiles for ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None
