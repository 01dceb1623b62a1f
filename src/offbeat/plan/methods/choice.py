"""The model of each exchange of an algorithm."""

from offbeat.exchange import Algorithm, GradientExchange, ParameterExchange
from offbeat.methods import (
    AdasumUpdate,
    Mean,
    OuterStep,
    PairAverage,
    PushSum,
    SlowMomentum,
    StaleAverage,
    TopK,
    TorchDDP,
)
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.adasum import AdasumTimes
from offbeat.plan.methods.mean import MeanTimes
from offbeat.plan.methods.outer_step import OuterStepTimes
from offbeat.plan.methods.pair_average import PairAverageTimes
from offbeat.plan.methods.push_sum import PushSumTimes
from offbeat.plan.methods.recorded import RecordedTimes
from offbeat.plan.methods.slot import BackwardTimes, StepTimes
from offbeat.plan.methods.slow_momentum import SlowMomentumTimes
from offbeat.plan.methods.stale_average import StaleAverageTimes
from offbeat.plan.methods.top_k import TopKTimes
from offbeat.plan.profile import Profile

# Either is None where the slot is empty, or disabled since its group has one member.
Slots = tuple[BackwardTimes | None, StepTimes | None]


def slots_of(algorithm: Algorithm, profile: Profile, fabric: Fabric) -> Slots:
    """Return the models of both slots; raises ValueError where the method refuses this layout."""
    gradients, parameters = algorithm.gradients, algorithm.parameters
    if gradients is not None and fabric.size(gradients.over) == 1:
        gradients = None
    if parameters is not None and fabric.size(parameters.over) == 1:
        is_shared = parameters.partition and fabric.ranks_per_node > 1
        parameters = parameters if is_shared else None
    return _backward(gradients, profile, fabric), _step(parameters, profile, fabric)


def _backward(
    exchange: GradientExchange | None, profile: Profile, fabric: Fabric
) -> BackwardTimes | None:
    match exchange:
        case None:
            return None
        case Mean() | TorchDDP():
            return MeanTimes(exchange, profile, fabric)
        case TopK():
            return TopKTimes(exchange, profile, fabric)
    raise ValueError(f"plan has no model of {exchange}; use one of the recipes")


def _step(exchange: ParameterExchange | None, profile: Profile, fabric: Fabric) -> StepTimes | None:
    match exchange:
        case None:
            return None
        case OuterStep():
            return OuterStepTimes(exchange, profile, fabric)
        case PushSum():
            return PushSumTimes(exchange, profile, fabric)
        case SlowMomentum():
            return SlowMomentumTimes(exchange, profile, fabric)
        case PairAverage():
            return PairAverageTimes(exchange, profile, fabric)
        case AdasumUpdate():
            return AdasumTimes(exchange, profile, fabric)
        case StaleAverage():
            return StaleAverageTimes(exchange, profile, fabric)
    return RecordedTimes(exchange, profile, fabric)
