"""What an exchange of the largest entries keeps about one replica."""

from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.exchange import Site
from offbeat.gradients.pipeline import Pipeline
from offbeat.gradients.top_k.plan import MessagePlan
from offbeat.gradients.top_k.timing import LayerTimer, LayerTimes


@dataclass(eq=False)
class TopKState:
    """State of an exchange on one replica; residuals and velocities are in the messages.

    Attributes:
        site: the parameters and the group.
        pipeline: the messages of a backward.
        plan: the densities from which the messages were made.
        exchanges: the number of steps in which there was an exchange.
        has_exchanged: whether this step is one of them.
        densities: by parameter, before warm-up; another object once they have changed.
        timer: measures backwards, while adaptive ratios need it.
        times: what the last measurement has found.
    """

    site: Site
    pipeline: Pipeline
    plan: MessagePlan
    densities: Mapping[str, float]
    exchanges: int = 0
    has_exchanged: bool = False
    timer: LayerTimer | None = None
    times: LayerTimes | None = None
