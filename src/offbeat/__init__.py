"""Communication-efficient data-parallel training for PyTorch.

The package implements five published methods and their baselines. :func:`replicate` connects a
model with its copies on other ranks, and a recipe determines what they exchange and when.

- Adasum: :func:`adasum`, adaptive summation of updates.
- Stochastic Gradient Push and Overlap SGP: :func:`sgp`, push-sum gossip of models.
- DASO: :func:`daso`, hierarchical and asynchronous averages between nodes.
- LAGS-SGD: :func:`lags`, layer-wise adaptive top-k gradients, overlapped with backward.
- Asynchronous Adam: :mod:`offbeat.hogwild`, lock-free updates of shared memory.

Outer optimizers on averages of models, between nodes far apart: :func:`diloco`,
:func:`sparse_loco` and :func:`noloco`.

Baselines are :func:`ddp`, :func:`local_sgd`, :func:`slgs`, :func:`d_psgd`, :func:`ad_psgd`,
:func:`torch_ddp` and :func:`alone`.
"""

import gc
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from offbeat.version import __version__ as __version__

if TYPE_CHECKING:
    from offbeat.names import *  # noqa: F403


def __getattr__(name: str) -> object:
    """Load the public names when the first is used: the command line shows help without torch."""
    if name == "__all__" or not name.startswith("__"):  # the import system asks for others
        names = _names()
        globals().update({each: getattr(names, each) for each in names.__all__})
        globals()["__all__"] = [*names.__all__, "__version__"]
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def _names() -> ModuleType:
    """Import the public names, without the collection of garbage that would fall into it.

    That goes through all objects of torch and finds nothing: half of the time of the import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module("offbeat.names")
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    __getattr__("__all__")
    return sorted(globals())
