"""The prediction of one method on one cluster: a run that is played on clocks."""

from dataclasses import dataclass
from typing import final

from offbeat.exchange import Algorithm
from offbeat.plan.clocks import Array, Clocks
from offbeat.plan.fabric import Fabric
from offbeat.plan.methods.choice import Slots, slots_of
from offbeat.plan.profile import Profile
from offbeat.plan.stragglers import Stragglers
from offbeat.transport.world import Axis

WARM_UP = 8  # steps before the first that counts, at least
EVEN = 24  # steps that count where all are alike, at least


@final
@dataclass(frozen=True)
class Parts:
    """Where the time of a step goes, in seconds; each part is what it adds to those before.

    Attributes:
        compute: forward, backward and the optimizer, without stragglers.
        passes: the method's own passes over memory, as far as they are not hidden.
        latency: messages without bytes.
        bandwidth: the bytes of messages.
        stragglers: steps of different length.
    """

    compute: float
    passes: float
    latency: float
    bandwidth: float
    stragglers: float

    @property
    def limit(self) -> str:
        """The name of the largest part."""
        return max(vars(self), key=lambda name: float(vars(self)[name]))


@final
@dataclass(frozen=True)
class Prediction:
    """What a method takes on a cluster; quantities per step are means over steps.

    Attributes:
        seconds: the time of a step on the slowest rank.
        kept: what all ranks train on in a second, relative to the sum of what each one would
            without exchanges and waits. With ``stragglers`` that leave out the slow rank it is also
            what is kept beside one that makes fewer steps: ``ElasticSampler(window=...)``.
        parts: where it goes.
        bytes_per_node: bytes that leave a node, without headers.
        wire_share: the share of the time in which a node's link sends or receives.
        memory: bytes that the exchange allocates on each rank.
        sent: bytes that a rank sends, by axis, as ``replica.stats()`` counts them; the mean.
    """

    seconds: float
    kept: float
    parts: Parts
    bytes_per_node: float
    wire_share: float
    memory: float
    sent: dict[Axis, float]


def predict(
    algorithm: Algorithm,
    profile: Profile,
    fabric: Fabric,
    stragglers: Stragglers | None = None,
    steps: int = 200,
) -> Prediction:
    """Predict the time of a step of ``algorithm``, from at least ``steps`` steps.

    Raises ``ValueError`` where the method refuses the layout.

    >>> from offbeat import ddp
    >>> from offbeat.plan import Parameter, Speeds
    >>> layer, speeds = Parameter("w", 10**6), Speeds.of_bandwidth(1e12)
    >>> profile = Profile.by_size([layer], 0.01, 0.02, 0.0, speeds)
    >>> found = predict(ddp(), profile, Fabric(nodes=4, rate=1e9))
    >>> round(found.seconds, 3), found.parts.limit
    (0.081, 'bandwidth')
    """
    slots, stragglers = slots_of(algorithm, profile, fabric), stragglers or Stragglers()
    networks = fabric.unlimited(at_once=True), fabric.unlimited(at_once=False), fabric
    times = [play(slots, profile, each, Stragglers(), EVEN)[0] for each in networks]
    seconds, clocks, counted = play(slots, profile, fabric, stragglers, steps)
    # Windows of TCP may be smaller where there are no limits of rates: no part exceeds the whole.
    before = [profile.compute, *(min(each, times[-1]) for each in times)]
    after = [*before[1:], seconds]
    added = [max(0.0, b - a) for a, b in zip(before, after, strict=True)]
    crossed = float(clocks.crossed.max()) / counted
    ranks = fabric.nodes * fabric.ranks_per_node
    alone = profile.compute * ranks / stragglers.speed(ranks)
    return Prediction(
        seconds=seconds,
        kept=alone / seconds if seconds else 1.0,
        parts=Parts(profile.compute, *added),
        bytes_per_node=crossed,
        wire_share=min(1.0, fabric.busy(crossed, crossed) / seconds) if seconds else 0.0,
        memory=sum(slot.memory for slot in slots if slot is not None),
        sent={axis: float(sent.mean()) / counted for axis, sent in clocks.sent.items()},
    )


def seconds_of_step(
    algorithm: Algorithm, profile: Profile, fabric: Fabric, stragglers: Stragglers
) -> float:
    """Predict the time of a step alone, from a few steps."""
    return play(slots_of(algorithm, profile, fabric), profile, fabric, stragglers, EVEN)[0]


def play(
    slots: Slots, profile: Profile, fabric: Fabric, stragglers: Stragglers, steps: int
) -> tuple[float, Clocks, int]:
    """Play a run of at least ``steps`` that count, whole periods of the method's exchanges.

    Returns the seconds of a step on the slowest rank, the clocks, and the steps that count.
    """
    parameters = slots[1]
    period, lead = (parameters.period, parameters.lead) if parameters else (1, 0)
    whole = parameters is not None and parameters.is_whole_run
    warm_up = 0 if whole else lead + -(-WARM_UP // period) * period
    counted = period if whole else -(-steps // period) * period
    factors = stragglers.draw(warm_up + counted, fabric.nodes, fabric.ranks_per_node)
    clocks = play_run(slots, profile, fabric, factors, warm_up)
    return float((clocks.now - clocks.began).max()) / counted, clocks, counted


def play_run(
    slots: Slots, profile: Profile, fabric: Fabric, factors: Array, warm_up: int
) -> Clocks:
    """Play one step for each of the ``factors`` (steps, nodes, ranks per node).

    What was sent, and ``began``, count from the end of ``warm_up`` steps.
    """
    gradients, parameters = slots
    if parameters is not None:
        parameters.restart()
    clocks = Clocks(fabric, profile)
    for step, clocks.pace in enumerate(factors):
        if step == warm_up:
            clocks.begin()
        clocks.spend(profile.forward)
        if gradients is None:
            clocks.spend(profile.backward)
        else:
            gradients.backward(clocks)
        clocks.spend(profile.optimizer)
        if parameters is not None:
            parameters.step(clocks, step)
    return clocks
