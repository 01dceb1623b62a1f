"""Compressed gradients, exchanged during backward, with error feedback."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, final

from torch import Tensor
from torch.optim import Optimizer

from offbeat.comm.group import Group
from offbeat.exchange import GradientExchange, Saved, Site
from offbeat.functional import runs_within
from offbeat.gradients.bucket import FIRST_BUCKET, capacity
from offbeat.gradients.compressor import CompressedMessage, Compressor
from offbeat.gradients.pipeline import Pipeline, by_readiness
from offbeat.gradients.residuals import inherit_means
from offbeat.gradients.saved_order import order_fault
from offbeat.gradients.units import Units
from offbeat.settings import above, check_settings, describe


@dataclass(eq=False)
class CompressedState:
    """State of :class:`Compressed` on one replica; residuals are in the messages."""

    site: Site
    pipeline: Pipeline


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class Compressed(GradientExchange[CompressedState]):
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

    def init(self, site: Site) -> CompressedState:
        """Build the messages, in reverse order of registration until the first step."""
        units = Units.of(site.registered, (), site.scaler, "gradient")
        state = CompressedState(site, Pipeline.on(site, units))
        self._build(state, {})
        return state

    def ready(self, state: CompressedState, name: str) -> None:
        """Add this parameter's gradient to its message; launch those that are full, in order."""
        state.pipeline.add(name)
        while state.pipeline.launch_next() is not None:
            pass

    def complete(self, state: CompressedState) -> bool:
        """Return whether every message was launched."""
        return state.pipeline.is_launched

    def finish(self, state: CompressedState) -> None:
        """Launch the messages that miss gradients too, wait, and hand out the results."""
        state.pipeline.finish()

    def stepped(self, state: CompressedState) -> None:
        """Rebuild the messages once the order of readiness was measured."""
        pipeline = state.pipeline
        pipeline.stepped()
        if not pipeline.is_current:
            self._build(state, pipeline.by_name("residual", state.site.parameters))

    def accumulated(self, state: CompressedState, name: str) -> None:
        """Note that this gradient was accumulated, but not exchanged."""
        state.pipeline.handed.accumulated(name)

    def optimizer_stepped(self, state: CompressedState, optimizer: Optimizer) -> None:
        """Note that the gradients of the optimizer's parameters were used."""
        state.pipeline.handed.optimizer_stepped(optimizer)

    def save(self, state: CompressedState) -> Saved:
        """Return this rank's residuals by name, and the order of readiness."""
        pipeline = state.pipeline
        return {
            "order": list(pipeline.order),
            "measured": pipeline.is_measured,
            "residual": pipeline.by_name("residual", state.site.parameters),
        }

    def unfit(self, state: CompressedState, saved: Saved) -> str | None:
        """Return what is wrong with the order, or None."""
        return order_fault(saved["order"], state.site.parameters)

    def shared(self, saved: Saved) -> Saved:
        """Return the order: messages of ranks with different ones would not fit together."""
        return {name: saved[name] for name in ("order", "measured")}

    def load(self, state: CompressedState, saved: Saved) -> None:
        """Restore what :meth:`save` returned."""
        state.pipeline.resume(saved["order"], saved["measured"])
        self._build(state, saved["residual"])

    def inherit(self, saved: Mapping[int, Saved], before: int, rank: int, size: int) -> Saved:
        """Keep the mean of the residuals in a world of another size.

        See :func:`offbeat.gradients.residuals.inherit_means`.
        """
        return inherit_means(saved, before, rank, size, ("residual",))

    def _build(self, state: CompressedState, residual: Mapping[str, Tensor]) -> None:
        site, pipeline = state.site, state.pipeline
        kinds: dict[object, list[str]] = {}
        for name in pipeline.order:
            kinds.setdefault(site.parameters[name].dtype, []).append(name)
        messages = []
        for names in kinds.values():
            sizes = [site.parameters[name].nbytes for name in names]
            most = capacity(sum(sizes), int(self.message_mb * 2**20))
            for run in runs_within(sizes, most, min(FIRST_BUCKET, most)):
                members = [names[i] for i in run]
                message = CompressedMessage(site, pipeline.group, members, self.compressor)
                messages.append(message)
        pipeline.replace(by_readiness(messages, pipeline.order), residual, {})
