"""The public names of ``offbeat``, which :mod:`offbeat` loads, with torch, when one is used."""

from offbeat.exchange import Algorithm, GradientExchange, ParameterExchange, Site
from offbeat.liveness.failure import PeerLost
from offbeat.methods.adasum.all_reduce import adasum_all_reduce
from offbeat.recipes.auto import auto
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
    "ad_psgd",
    "adasum",
    "adasum_all_reduce",
    "algorithm",
    "alone",
    "auto",
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
