"""The model of each exchange of an algorithm."""

from collections.abc import Callable
from typing import Any

from offbeat.exchange import Algorithm
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
from offbeat.plan.methods.gradients import GradientTimes
from offbeat.plan.methods.outer_step import OuterStepTimes
from offbeat.plan.methods.pair_average import PairAverageTimes
from offbeat.plan.methods.push_sum import PushSumTimes
from offbeat.plan.methods.recorded import RecordedTimes
from offbeat.plan.methods.slot import StepTimes
from offbeat.plan.methods.slow_momentum import SlowMomentumTimes
from offbeat.plan.methods.stale_average import StaleAverageTimes
from offbeat.plan.profile import Profile

# Either is None where the slot is empty, or disabled since its group has one member.
Slots = tuple[GradientTimes | None, StepTimes | None]
# Of exchanges whose ranks are not alike, or that send too many messages to record thousands.
MODELS: dict[type, Callable[[Any, Profile, Fabric], StepTimes]] = {
    OuterStep: OuterStepTimes,
    PushSum: PushSumTimes,
    SlowMomentum: SlowMomentumTimes,
    PairAverage: PairAverageTimes,
    AdasumUpdate: AdasumTimes,
    StaleAverage: StaleAverageTimes,
}


def slots_of(algorithm: Algorithm, profile: Profile, fabric: Fabric) -> Slots:
    """Return the models of both slots; raises ValueError where the method refuses this layout."""
    if algorithm.then is not None:
        raise ValueError("a schedule has steps of several lengths; list its algorithms instead")
    if algorithm.auto is not None:
        raise ValueError("auto() chooses during training; list its candidates instead")
    gradients, parameters = algorithm.gradients, algorithm.parameters
    backward, step = None, None
    if gradients is not None and fabric.size(gradients.over) > 1:
        if not isinstance(gradients, Mean | TopK | TorchDDP):
            raise ValueError(f"plan has no model of {gradients}; use one of the recipes")
        backward = GradientTimes(gradients, profile, fabric)
    if parameters is not None and (
        fabric.size(parameters.over) > 1 or (parameters.partition and fabric.ranks_per_node > 1)
    ):
        step = MODELS.get(type(parameters), RecordedTimes)(parameters, profile, fabric)
    return backward, step
