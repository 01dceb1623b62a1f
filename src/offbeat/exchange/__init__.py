"""The two slots of a training step, and the interfaces of the exchanges that fill them."""

from offbeat.exchange.algorithm import Algorithm
from offbeat.exchange.bound import BoundGradients, BoundParameters, IdleGradients, IdleParameters
from offbeat.exchange.exchanged import Exchanged
from offbeat.exchange.interface import (
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
    count_fault,
    empty_slices,
    nested,
    plain,
    scratch,
    sections,
    slices_of,
    tensors,
)

__all__ = [
    "Algorithm",
    "BoundGradients",
    "BoundParameters",
    "Exchange",
    "Exchanged",
    "GradientExchange",
    "IdleGradients",
    "IdleParameters",
    "ParameterExchange",
    "Saved",
    "Site",
    "State",
    "Variable",
    "by_name",
    "count_fault",
    "empty_slices",
    "nested",
    "plain",
    "scratch",
    "sections",
    "slices_of",
    "tensors",
]
