"""Compressed gradients, exchanged during backward, with error feedback."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, final

from torch import Tensor
from torch.optim import Optimizer

from offbeat.comm.group import Group
from offbeat.exchange import BoundGradients, GradientExchange, Saved, Site, Variable
from offbeat.functional import runs_within
from offbeat.gradients.bucket import FIRST_BUCKET, capacity
from offbeat.gradients.compressor import CompressedMessage, Compressor
from offbeat.gradients.pipeline import Pipeline, by_readiness
from offbeat.gradients.residuals import inherit_means
from offbeat.gradients.saved_order import declared_order
from offbeat.gradients.units import Units
from offbeat.settings import above, check_settings, describe


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class Compressed(GradientExchange):
    r"""Exchanges gradients through a :class:`Compressor`, with error feedback.

    .. math::
        acc_t = \epsilon_{t-1} + G_t, \quad \epsilon_t = acc_t - C(acc_t), \quad
        g_t = \frac{1}{P} \sum_{p=1}^{P} C(acc^p_t)

    with the gradient G, the residual :math:`\epsilon` and the compression C of all gradients of a
    message. Messages are filled in the order in which gradients became ready on rank 0 in its
    first backward, launched during backward in that order on every rank, and smaller than
    ``message_mb`` where a model would fill fewer than eight. If any rank has a gradient that is
    not finite, all ranks' residuals stay as before this backward and every ``.grad`` becomes NaN.
    Residuals are saved by name; a world of another size continues with their mean. A parameter
    without a gradient on any rank keeps its residual, and its gradient stays None. A gradient that
    is discarded leaves no trace in residuals, see :class:`TopK`; what a compressor itself remembers
    (a warm start) is out of reach.

    Args:
        compressor: a subclass of :class:`Compressor`, or what makes one, given a flat tensor and a
            group. Its name must be equal on all ranks.
        message_mb: MiB of gradients in a message, before compression, at most.
        over: "world", or "local" for the ranks of a node.

    Bytes sent per step: the compressor's, and 8 (P-1)/P for each parameter and message. Extra
    memory: two models (three once several backwards exchange before a gradient is used), one copy
    of the gradients while backward runs, and the compressor's. Passes over memory: four (add,
    subtract, check, copy), and the compressor's.

    Source: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019,
    Algorithm 2.
    """

    compressor: Callable[[Tensor, Group], Compressor]
    message_mb: Annotated[float, above(0, "MiB")] = 25.0
    over: Literal["world", "local"] = "world"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self)

    def __repr__(self) -> str:
        return describe(self)

    @property
    def takes_shards(self) -> bool:
        """Whether it exchanges between nodes: FSDP2 has averaged inside them, uncompressed."""
        return self.over == "world"

    def bind(self, site: Site) -> "BoundCompressed":
        """Build the messages, in reverse order of registration until the first step."""
        units = Units.of(site.registered, (), site.scaler, "gradient")
        bound = BoundCompressed(site, self, Pipeline.on(site, units))
        bound.build({})
        return bound

    def inherit(self, saved: Mapping[int, Saved], before: int, rank: int, size: int) -> Saved:
        """Keep the mean of the residuals in a world of another size.

        See :func:`offbeat.gradients.residuals.inherit_means`.
        """
        return inherit_means(saved, before, rank, size, ("residual",))


@dataclass(eq=False)
class BoundCompressed(BoundGradients):
    """:class:`Compressed` on one replica; residuals are in the messages."""

    site: Site
    settings: Compressed
    pipeline: Pipeline

    def state(self) -> Iterator[Variable]:
        """Yield this rank's residuals by name, and the order of readiness."""
        yield from declared_order(self.pipeline, self.site.parameters)
        yield Variable("residual", "own", self._residuals, self.build)

    def _residuals(self) -> dict[str, Tensor]:
        return self.pipeline.by_name("residual", self.site.parameters)

    def ready(self, name: str) -> None:
        """Add this parameter's gradient to its message; launch those that are full, in order."""
        self.pipeline.add(name)
        while self.pipeline.launch_next() is not None:
            pass

    def complete(self) -> bool:
        """Return whether every message was launched."""
        return self.pipeline.is_launched

    def finish(self) -> None:
        """Launch the messages that miss gradients too, wait, and hand out the results."""
        self.pipeline.finish()

    def stepped(self) -> None:
        """Rebuild the messages once the order of readiness was measured."""
        pipeline = self.pipeline
        pipeline.stepped()
        if not pipeline.is_current:
            self.build(self._residuals())

    def accumulated(self, name: str) -> None:
        """Note that this gradient was accumulated, but not exchanged."""
        self.pipeline.handed.accumulated(name)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note that the gradients of the optimizer's parameters were used."""
        self.pipeline.handed.optimizer_stepped(optimizer)

    def build(self, residual: Mapping[str, Tensor]) -> None:
        """Build the messages in the order of readiness, with these residuals."""
        site, pipeline = self.site, self.pipeline
        kinds: dict[object, list[str]] = {}
        for name in pipeline.order:
            kinds.setdefault(site.parameters[name].dtype, []).append(name)
        messages = []
        for names in kinds.values():
            sizes = [site.parameters[name].nbytes for name in names]
            most = capacity(sum(sizes), int(self.settings.message_mb * 2**20))
            for run in runs_within(sizes, most, min(FIRST_BUCKET, most)):
                members = [names[i] for i in run]
                message = CompressedMessage(site, pipeline.group, members, self.settings.compressor)
                messages.append(message)
        pipeline.replace(by_readiness(messages, pipeline.order), residual, {})
