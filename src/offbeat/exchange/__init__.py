"""The two slots of a training step, and the interfaces of the exchanges that fill them."""

from offbeat.exchange.algorithm import Algorithm
from offbeat.exchange.bound import BoundParameters, Idle
from offbeat.exchange.interface import (
    ElasticExchange,
    Exchange,
    GradientExchange,
    ParameterExchange,
)
from offbeat.exchange.site import Site
from offbeat.exchange.state import (
    Saved,
    State,
    Variable,
    by_name,
    nested,
    plain,
    scratch,
    sections,
    slices_of,
    tensors,
)

__all__ = [
    "Algorithm",
    "BoundParameters",
    "ElasticExchange",
    "Exchange",
    "GradientExchange",
    "Idle",
    "ParameterExchange",
    "Saved",
    "Site",
    "State",
    "Variable",
    "by_name",
    "nested",
    "plain",
    "scratch",
    "sections",
    "slices_of",
    "tensors",
]
