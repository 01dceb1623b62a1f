"""Workers on one machine that share memory and exchange nothing: asynchronous Adam.

:class:`AsyncAdam` is a torch optimizer, :func:`launch` starts processes that share it, and
:class:`AsyncAdamClassifier` is logistic regression on sparse matrices, in threads.
"""

try:
    import numba  # noqa: F401
    import scipy  # noqa: F401
    import sklearn  # noqa: F401
except ImportError as missing:
    raise ImportError(
        f"offbeat.hogwild needs {missing.name}, which is not installed; "
        "install it with: pip install 'offbeat[hogwild]'"
    ) from missing

from offbeat.hogwild.adam import AsyncAdam
from offbeat.hogwild.classifier import AsyncAdamClassifier
from offbeat.hogwild.launch import WorkerFailed, launch
from offbeat.hogwild.node import NodeReplica
from offbeat.hogwild.worker import report_loss

__all__ = [
    "AsyncAdam",
    "AsyncAdamClassifier",
    "NodeReplica",
    "WorkerFailed",
    "launch",
    "report_loss",
]
