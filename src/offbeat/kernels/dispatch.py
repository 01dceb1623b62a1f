"""Which implementation of an operation runs here: torch, or machine code where numba is installed.

numba is imported on the first use only: the import takes about a second.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat import functional
from offbeat.functional import GramAnalysis, Segment
from offbeat.functional.push_sum import Messages

Select = Callable[[Tensor, int], Tensor]  # (x, k): k indices into x
BlockSelect = Callable[[Tensor, Sequence[tuple[int, int, int]]], Tensor]  # (x, [(start, stop, k)])


class PushSumPasses(NamedTuple):
    """The two passes over memory of a push-sum exchange, and both in one."""

    fill_messages: Callable[[Tensor, Tensor | None, float, Messages], None]
    add_messages: Callable[[Tensor, Tensor | None, float, Messages, Sequence[Tensor]], None]
    fill_and_add: Callable[[Tensor, Tensor | None, float, float, Messages, Sequence[Tensor]], None]


class AdasumPasses(NamedTuple):
    """The two passes of Adasum over the vectors of all ranks, and the step between them."""

    add_gram: Callable[[Tensor, Sequence[Segment], Tensor], None]
    analyze: Callable[[Tensor], GramAnalysis]
    combine_rows: Callable[[Tensor, Sequence[Segment], Tensor, Tensor], None]


def push_sum_passes(device: torch.device) -> PushSumPasses:
    """Return the fastest push-sum passes on ``device``; results differ by rounding only.

    On a CPU with numba those of :mod:`offbeat.kernels.push_sum`: 4.5 ms for 3.2 million
    parameters and 16-bit messages, where the torch operations take 10 ms.

    >>> push_sum_passes(torch.device("cuda")).add_messages.__module__
    'offbeat.functional.push_sum'
    """
    if device.type == "cpu" and _has_numba():
        from offbeat.kernels import push_sum

        return PushSumPasses(push_sum.fill_messages, push_sum.add_messages, push_sum.fill_and_add)
    return PushSumPasses(functional.fill_messages, functional.add_messages, functional.fill_and_add)


def adasum_passes(compiled: bool) -> AdasumPasses:
    """Return the passes of Adasum in torch or, if ``compiled``, in machine code.

    The caller decides, since all ranks must use the same (see :func:`machine_code`). Results
    differ by the order of float64 sums only.

    >>> adasum_passes(compiled=False).add_gram.__module__
    'offbeat.functional.adasum'
    """
    if not compiled:
        return AdasumPasses(functional.add_gram, functional.analyze, functional.combine_rows)
    from offbeat.kernels import adasum

    return AdasumPasses(adasum.add_gram, adasum.analyze, adasum.combine_rows)


@cache
def machine_code() -> str:
    """Identify the code that numba generates here; ranks with equal strings round alike.

    The name of the processor is not sufficient: a virtual machine may hide its wider vectors, and
    sums over those run in another order. "" without numba.

    >>> machine_code() == machine_code()
    True
    """
    if not _has_numba():
        return ""
    import numba
    from llvmlite import binding

    features = binding.get_host_cpu_features().flatten()
    return f"{numba.__version__} {binding.get_host_cpu_name()} {features}"


def top_k_selection(device: torch.device, exact: bool = False) -> Select:
    """Return the fastest top-k selection on ``device``; results differ in ties only.

    On a CPU with numba :func:`offbeat.kernels.top_k.scanned_top_k`; otherwise
    :func:`offbeat.functional.sampled_top_k`, or :func:`offbeat.functional.top_k` if ``exact``.

    >>> top_k_selection(torch.device("cuda")).__name__
    'sampled_top_k'
    """
    if device.type == "cpu" and _has_numba():
        from offbeat.kernels.top_k import scanned_top_k

        return scanned_top_k
    return functional.top_k if exact else functional.sampled_top_k


def top_k_of_blocks(device: torch.device, exact: bool = False) -> BlockSelect:
    """Return :func:`top_k_selection` for many blocks of one flat tensor in one call.

    The callable takes x and (start, stop, k) of every block, and returns indices into x, block
    after block.

    >>> select = top_k_of_blocks(torch.device("cpu"))
    >>> select(torch.tensor([1.0, -3.0, 0.0, 2.0]), [(0, 2, 1), (2, 4, 1)])
    tensor([1, 3])
    """
    if device.type == "cpu" and _has_numba():
        from offbeat.kernels.top_k import scanned_blocks

        return scanned_blocks
    return each_block(top_k_selection(device, exact))


def each_block(select: Select) -> BlockSelect:
    """Apply ``select`` to every block of a flat tensor.

    >>> select = each_block(functional.top_k)
    >>> select(torch.tensor([1.0, -3.0, 0.0, 2.0]), [(0, 2, 1), (2, 4, 1)])
    tensor([1, 3])
    """
    return lambda x, blocks: torch.cat([select(x[i:j], k).add_(i) for i, j, k in blocks])


def _has_numba() -> bool:
    return find_spec("numba") is not None
