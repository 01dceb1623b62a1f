"""The two slots of a training step, and the interfaces of the exchanges that fill them."""

from offbeat.exchange.algorithm import Algorithm
from offbeat.exchange.interface import (
    ElasticExchange,
    Exchange,
    GradientExchange,
    ParameterExchange,
    Saved,
    State,
)
from offbeat.exchange.site import Site

__all__ = [
    "Algorithm",
    "ElasticExchange",
    "Exchange",
    "GradientExchange",
    "ParameterExchange",
    "Saved",
    "Site",
    "State",
]
