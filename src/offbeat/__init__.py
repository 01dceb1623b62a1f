"""Data-parallel training for PyTorch that does not wait for the slowest wire.

Start with :func:`replicate` and a recipe: :func:`ddp`, :func:`adasum`, :func:`local_sgd` or
:func:`sgp`.
"""

from offbeat.adasum_wire import adasum_all_reduce
from offbeat.attach import replicate
from offbeat.exchange import Algorithm, GradientExchange, ParameterExchange, Site
from offbeat.groups import Groups
from offbeat.heartbeat import PeerLost
from offbeat.recipes import adasum, algorithm, alone, ddp, local_sgd, sgp, torch_ddp
from offbeat.replica import Replica
from offbeat.telemetry import JsonLines, TensorBoard
from offbeat.topology import OnePeerExponential, Peers, Ring, Topology

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "GradientExchange",
    "Groups",
    "JsonLines",
    "OnePeerExponential",
    "ParameterExchange",
    "PeerLost",
    "Peers",
    "Replica",
    "Ring",
    "Site",
    "TensorBoard",
    "Topology",
    "__version__",
    "adasum",
    "adasum_all_reduce",
    "algorithm",
    "alone",
    "ddp",
    "local_sgd",
    "replicate",
    "sgp",
    "torch_ddp",
]
