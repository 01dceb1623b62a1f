"""Checks of the first step after an attach or a load: a second wrapper, parameters that differ."""

import gc
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from offbeat.attach.connection import Connection
from offbeat.exchange import Algorithm, Exchanged
from offbeat.exchange.sharding import local
from offbeat.platform.process_group import is_running
from offbeat.transport.small_gathers import gather_numbers
from offbeat.transport.world import World

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

WRAPPED = (
    "the model is wrapped in DistributedDataParallel; pass the bare model (model.module), and "
    "train it without the wrapper"
)


def digest(parameters: Iterable[Tensor]) -> int:
    """Return 32 bits that depend on all bits of the parameters; one reading pass.

    >>> digest([torch.tensor([1.0, 2.0])]) == digest([torch.tensor([1.0, 2.0])])
    True
    >>> digest([torch.tensor([1.0, 2.0])]) == digest([torch.tensor([1.0, 2.5])])
    False
    """
    words = [local(p).detach().reshape(-1).view(_WORDS[p.itemsize]) for p in parameters]
    sums = torch.stack([word.sum(dtype=torch.int64) for word in words])
    return zlib.crc32(sums.cpu().numpy().tobytes())


def wrapper_fault(model: Exchanged, algorithm: Algorithm) -> str | None:
    """Return the error for a model that was wrapped after ``replicate``, or None."""
    # Frameworks do so, and gradients would be all-reduced twice. The wrapper leaves no mark on what
    # it wraps, so all objects of the process are looked through: 22 ms for 170,000 of them.
    if not is_running() or (algorithm.gradients and algorithm.gradients.is_wrapper):
        return None
    own = {id(parameter) for parameter in model.parameters.values()}
    kinds = set(_kinds(DistributedDataParallel))  # issubclass() would take five times as long
    wrappers = [o for o in gc.get_objects() if type(o) in kinds]
    is_wrapped = any(id(p) in own for wrapper in wrappers for p in wrapper.parameters())
    return WRAPPED if is_wrapped else None


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    narrower: type[Any]
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


def check_start(
    model: Exchanged,
    algorithm: Algorithm,
    connection: Connection,
    mine: int | None,
    is_changed: bool,
    is_averaged: bool,
) -> str | None:
    """Compare the parameters with which the ranks began to train; all ranks call.

    ``mine`` is this rank's :func:`digest`, or None if it has run no backward; ``is_changed``: they
    are not those of the attach, the load or ``finish()``; ``is_averaged``: all were equal then.

    Raises ``ValueError`` on all ranks for a wrapper, or if parameters differ between ranks that the
    algorithm keeps equal. Returns a note if they differ where they may.
    """
    parameters, world, control = algorithm.parameters, connection.world, connection.control
    fault = wrapper_fault(model, algorithm)
    if fault is None and is_changed and parameters and parameters.anchored:
        fault = (
            f"parameters were written to after replicate(), and {algorithm} counts from those at "
            "the attach; load a model before replicate(), or call finish() after loading it"
        )
    if fault is not None:
        raise connection.report_error(ValueError(f"rank {world.rank}: {fault}"))
    if control is None or (parameters is not None and not parameters.waits):
        return None  # no step may wait for another rank
    gathered = gather_numbers([math.nan if mine is None else float(mine)], control)
    found = dict(zip(control.ranks, (d for (d,) in gathered), strict=True))
    everyone = world.counterparts if model.is_sharded else (world.ranks,)
    for ranks in _kept_equal(algorithm, world, is_averaged, everyone):
        if (different := _different(found, ranks)) is not None:
            raise ValueError(
                f"ranks {different[0]} and {different[1]} started from different parameters, and "
                f"{algorithm} keeps them equal; load the same model file on all ranks, before "
                "replicate() or after it"
            )
    for ranks in everyone if is_averaged else ():
        if (different := _different(found, ranks)) is not None:
            return (
                f"ranks {different[0]} and {different[1]} started from different parameters: was "
                "the same model file loaded on all ranks?"
            )
    return None


def keeps_equal(algorithm: Algorithm) -> bool:
    """Return whether all ranks hold equal parameters after every step."""
    gradients = algorithm.gradients
    return algorithm.parameters is None and gradients is not None and gradients.over == "world"


def _kept_equal(
    algorithm: Algorithm, world: World, is_averaged: bool, everyone: Sequence[Sequence[int]]
) -> Sequence[Sequence[int]]:
    """Return sets of ranks that hold equal parameters at the start of this step."""
    gradients, parameters = algorithm.gradients, algorithm.parameters
    starts_equal = parameters is not None and parameters.starts_equal
    if keeps_equal(algorithm) or (is_averaged and starts_equal):
        return everyone
    within = gradients is not None and gradients.over == "local" and everyone == (world.ranks,)
    return world.nodes if within else ()


def _different(found: dict[int, float], ranks: Sequence[int]) -> tuple[int, int] | None:
    known = [rank for rank in ranks if not math.isnan(found[rank])]
    other = next((rank for rank in known if found[rank] != found[known[0]]), None)
    return None if other is None else (known[0], other)
