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

from offbeat.exchange import Algorithm, GradientExchange, ParameterExchange, Site
from offbeat.liveness.failure import PeerLost
from offbeat.methods.adasum.all_reduce import adasum_all_reduce
from offbeat.recipes.gradients import alone, ddp, lags, slgs, torch_ddp
from offbeat.recipes.methods import ad_psgd, adasum, d_psgd, daso, local_sgd, sgp
from offbeat.recipes.outer import diloco, noloco, sparse_loco
from offbeat.recipes.text import algorithm
from offbeat.replica.batch_norm import sync_batch_norm
from offbeat.replica.preemption import leave_on_signal
from offbeat.replica.replica import Replica
from offbeat.replica.replicate import replicate
from offbeat.replica.saving.per_rank import load_per_rank, save_per_rank
from offbeat.telemetry.writers import JsonLines, TensorBoard
from offbeat.topology.digraph import Digraph
from offbeat.topology.families import BipartiteExponential, Complete, Exponential, Ring
from offbeat.topology.graph import Peers, Topology
from offbeat.topology.phases import Phases
from offbeat.transport.world import World
from offbeat.version import __version__

__all__ = [
    "Algorithm",
    "BipartiteExponential",
    "Complete",
    "Digraph",
    "Exponential",
    "GradientExchange",
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
    "World",
    "__version__",
    "ad_psgd",
    "adasum",
    "adasum_all_reduce",
    "algorithm",
    "alone",
    "d_psgd",
    "daso",
    "ddp",
    "diloco",
    "lags",
    "leave_on_signal",
    "load_per_rank",
    "local_sgd",
    "noloco",
    "replicate",
    "save_per_rank",
    "sgp",
    "slgs",
    "sparse_loco",
    "sync_batch_norm",
    "torch_ddp",
]
