"""Asynchronous Adam (Renda): workers on one machine that update shared memory without locks.

:class:`AsyncAdam` is a torch optimizer, :func:`launch` starts processes that share it, and
:class:`AsyncAdamClassifier` is logistic regression on sparse matrices, in threads.
"""

from typing import TYPE_CHECKING, Any

from offbeat.extras import extra
from offbeat.hogwild.adam import AsyncAdam
from offbeat.hogwild.launch import WorkerFailed, launch
from offbeat.hogwild.node import NodeReplica
from offbeat.hogwild.worker import report_loss

if TYPE_CHECKING:
    from offbeat.hogwild.logistic.classifier import AsyncAdamClassifier

__all__ = [
    "AsyncAdam",
    "AsyncAdamClassifier",
    "NodeReplica",
    "WorkerFailed",
    "launch",
    "report_loss",
]


def __getattr__(name: str) -> Any:
    """Import the classifier on first use: workers do not wait for the import of scikit-learn."""
    if name != "AsyncAdamClassifier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra("hogwild"):
        from offbeat.hogwild.logistic.classifier import AsyncAdamClassifier
    return AsyncAdamClassifier
