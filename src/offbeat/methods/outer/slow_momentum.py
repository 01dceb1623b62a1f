"""SlowMo: gossip, and every few steps an outer optimizer that steps the exact average."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, final

from torch import Tensor

from offbeat.exchange import BoundParameters, ParameterExchange, Site, Variable, nested
from offbeat.exchange.interface import OnLoss
from offbeat.methods.outer.fragment import Fragment
from offbeat.methods.outer.optimizer import builder_of
from offbeat.methods.push_sum.bound import BoundPushSum
from offbeat.methods.push_sum.push_sum import PushSum
from offbeat.settings import at_least, check_settings, describe
from offbeat.topology.schedule import due
from offbeat.transport.collectives import peers_of_mean


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class SlowMomentum(ParameterExchange):
    r"""Gossip, and step the exact average by an outer optimizer every ``every`` steps (SlowMo).

    .. math::
        \Delta = a - \sum_i x_i \Big/ \sum_i w_i, \quad
        a \leftarrow \mathrm{outer}(a, \Delta), \quad
        x_i \leftarrow a, \quad w_i \leftarrow 1
        \quad \text{if } (k+1) \bmod every = 0

    after k earlier steps, each of which gossips. The sums run over all participants, and count
    numerators x and weights w that are in flight. The anchor a is the model after the last outer
    step, the same on all ranks; the pseudo-gradient takes the place of its gradient. Gossip then
    starts anew from equal models, with nothing in flight.

    Args:
        gossip: what happens after every step, the paper's base optimizer.
        outer: the optimizer of the anchor, as of :class:`offbeat.methods.OuterStep`. Of SGD
            ``lr`` is the paper's alpha, and ``momentum`` its beta.
        every: the paper's tau, steps between two averages.

    SGD with a learning rate of 1 and no momentum is gossip with a ``finish()`` every ``every``
    steps: for float64 bit for bit, for float32 but for the rounding of sums, which are float64 in
    ``finish()``; for 16-bit parameters it also carries what their rounding takes to the next
    average. The average blocks, also with ``overlap``: that is the method.

    The anchor begins with the parameters at the attach, and ``finish()`` sets it to the average
    and resets the outer optimizer. Load a model before ``replicate()``, or call ``finish()``
    after loading; otherwise the first step is an error on all ranks. Later in a run call
    ``finish()`` before loading too, or gossip in flight is added to the model that was loaded.

    Raises ``ValueError`` on all ranks for an average that is not finite, before the anchor is
    changed.

    Bytes sent per step: those of the gossip, and 2 (n-1)/n of the model's divided by ``every``,
    in float32 for 16-bit parameters; between nodes, one gather of the model inside each of them
    more than the gossip's. Extra memory beside the gossip's: an average, an anchor, and the outer
    optimizer's state (SGD with momentum: one model); during an outer step two models more. With
    nodes as participants anchor and state are divided between the ranks of a node. Passes over
    memory per outer step: twelve.

    Source: Wang et al. 2020, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
    Momentum", Algorithm 1. There the momentum is divided by the learning rate of the optimizer,
    and multiplied by that of the next outer step: the same while the rate is constant. Momentum
    and other state of the optimizer stay as they are, one of the paper's choices.

    >>> SlowMomentum(gossip=PushSum(overlap=1), every=12).outer
    'SGD(lr=1.0, momentum=0.6)'
    """

    gossip: PushSum = field(default_factory=PushSum)
    outer: (
        Annotated[str, "such as 'SGD(lr=1.0, momentum=0.6)'"]
        | Annotated[Callable[..., Any], "that builds a torch.optim.Optimizer"]
    ) = "SGD(lr=1.0, momentum=0.6)"
    every: Annotated[int, at_least(1, "steps")] = 48
    anchored: ClassVar[bool] = True  # the pseudo-gradient counts from the parameters at the attach

    def __post_init__(self) -> None:
        check_settings(self)
        builder_of(self.outer)

    def __repr__(self) -> str:
        return describe(self)

    @property
    def over(self) -> Literal["world", "node"]:  # type: ignore[override]  # nobody writes it
        """The participants of the gossip."""
        return self.gossip.over

    @property
    def takes_weights(self) -> bool:
        """Whether the gossip does, whose sums are averaged."""
        return self.gossip.takes_weights

    @property
    def on_loss(self) -> OnLoss:
        """The gossip starts anew, from the same anchor."""
        return self.gossip.on_loss

    def growth_fault(self, size: int) -> str | None:
        """Return that of the gossip."""
        return self.gossip.growth_fault(size)

    def peers(self, site: Site) -> Collection[int] | None:
        """Return those of the gossip; any for 16-bit means."""
        given = self.gossip.peers(site)
        return given if peers_of_mean(site.parameters.values()) == () else None

    def bind(self, site: Site) -> "BoundSlowMomentum":
        """Check the graphs, and allocate messages, the anchor and the outer optimizer."""
        gossip = self.gossip.bind(site)
        model = Fragment.of(site, list(site.parameters), self.outer)
        return BoundSlowMomentum(site, self, gossip, model)


@dataclass(eq=False)
class BoundSlowMomentum(BoundParameters):
    """:class:`SlowMomentum` on one replica: ``model`` holds the anchor, in one part."""

    site: Site
    settings: SlowMomentum
    gossip: BoundPushSum
    model: Fragment

    def state(self) -> Iterator[Variable]:
        """Yield what the gossip keeps, the anchor and the state of the outer optimizer."""
        yield nested("gossip", self.gossip)
        yield nested("outer", self.model)

    def step(self, step: int) -> None:
        """Gossip, and make an outer step if (k+1) mod ``every`` is 0, where k is ``step``."""
        self.gossip.step(step)
        if not due(step, self.settings.every):
            return
        flat, numerators, weight = self.gossip.mass()
        # In each dtype a rank has its own slice of the messages; here dtypes may be one tensor.
        self.site.gather(flat)
        self.model.send_mass(numerators, weight)
        try:
            self.model.merge(mixing=0.0)
        finally:  # after an error too: what is in flight may not be finite either
            self.gossip.reset()

    def mass(self) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the numerators and the weight of the gossip; between averages nothing is added."""
        return self.gossip.mass()

    def reset(self) -> None:
        """Start anew from equal replicas: no gossip in flight, anchor = parameters, no momentum."""
        self.gossip.reset()
        self.model.restart()

    def unsent(self) -> list[Tensor]:
        """Return the mass of the gossip."""
        return self.gossip.unsent()

    def add_unsent(self, shares: Sequence[Tensor]) -> None:
        """Add to the mass of the gossip."""
        self.gossip.add_unsent(shares)

    def drain(self) -> float:
        """Merge the gossip in flight."""
        return self.gossip.drain()

    def restart(self, weight: float) -> None:
        """Start the gossip anew."""
        self.gossip.restart(weight)

    def staleness(self, step: int) -> int:
        """Return the steps since the last average, or the age of the last message if it is less."""
        return min(self.gossip.staleness(step), step % self.settings.every)

    def measures(self) -> dict[str, float]:
        """Return those of the gossip."""
        return self.gossip.measures()
