"""Data-parallel training for PyTorch that does not wait for the slowest wire.

Start with :func:`replicate` and a recipe: :func:`ddp`, :func:`adasum`, :func:`daso`,
:func:`local_sgd` or :func:`sgp`.
"""

from offbeat.adasum_wire import adasum_all_reduce
from offbeat.attach import replicate
from offbeat.batch_norm import sync_batch_norm
from offbeat.exchange import Algorithm, GradientExchange, ParameterExchange, Site
from offbeat.graphs import (
    BipartiteExponential,
    Complete,
    Digraph,
    Exponential,
    Phases,
    Ring,
)
from offbeat.groups import Groups
from offbeat.heartbeat import PeerLost
from offbeat.recipes import (
    ad_psgd,
    adasum,
    algorithm,
    alone,
    d_psgd,
    daso,
    ddp,
    lags,
    local_sgd,
    sgp,
    slgs,
    torch_ddp,
)
from offbeat.replica import Replica
from offbeat.telemetry import JsonLines, TensorBoard
from offbeat.topology import Peers, Topology

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "BipartiteExponential",
    "Complete",
    "Digraph",
    "Exponential",
    "GradientExchange",
    "Groups",
    "JsonLines",
    "ParameterExchange",
    "PeerLost",
    "Peers",
    "Phases",
    "Replica",
    "Ring",
    "Site",
    "TensorBoard",
    "Topology",
    "__version__",
    "ad_psgd",
    "adasum",
    "adasum_all_reduce",
    "algorithm",
    "alone",
    "d_psgd",
    "daso",
    "ddp",
    "lags",
    "local_sgd",
    "replicate",
    "sgp",
    "slgs",
    "sync_batch_norm",
    "torch_ddp",
]
