"""Recipes: the algorithm of each method by name."""

from offbeat.recipes.gradients import alone, ddp, lags, slgs, torch_ddp
from offbeat.recipes.methods import (
    RECIPES,
    ad_psgd,
    adasum,
    d_psgd,
    daso,
    local_sgd,
    sgp,
)
from offbeat.recipes.outer import diloco, noloco, sparse_loco
from offbeat.recipes.text import ALGORITHM_VARIABLE, algorithm

__all__ = [
    "ALGORITHM_VARIABLE",
    "RECIPES",
    "ad_psgd",
    "adasum",
    "algorithm",
    "alone",
    "d_psgd",
    "daso",
    "ddp",
    "diloco",
    "lags",
    "local_sgd",
    "noloco",
    "sgp",
    "slgs",
    "sparse_loco",
    "torch_ddp",
]
