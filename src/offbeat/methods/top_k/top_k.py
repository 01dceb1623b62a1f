"""LAGS-SGD: the largest entries of each layer, exchanged during backward, with residuals."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.exchange import Saved, Site, Variable, count_fault, plain
from offbeat.exchange.engine.error_feedback import ErrorFeedback, FeedbackExchange
from offbeat.exchange.engine.message import FeedbackMessage
from offbeat.exchange.engine.rows import Rows
from offbeat.exchange.engine.units import Units, optimizer_fault
from offbeat.exchange.interface import OnLoss
from offbeat.functional import warm_density
from offbeat.functional.messages.sixteen_bits import Sixteen
from offbeat.kernels.dispatch import BlockSelect, Select, each_block, top_k_of_blocks
from offbeat.methods.top_k.correction import Correction
from offbeat.methods.top_k.dense import DenseMessage
from offbeat.methods.top_k.density import OfLayer, densities_fault, layer_densities, mapping_fault
from offbeat.methods.top_k.plan import MessagePlan
from offbeat.methods.top_k.sparse import SparseMessage
from offbeat.methods.top_k.timing import LayerTimer, LayerTimes, average_times
from offbeat.settings import above, at_least, between, check_settings, describe
from offbeat.transport.collectives import peers_of_mean

WATCHED = 5  # backwards whose times decide about ratios


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(FeedbackExchange):
    r"""Exchanges the k largest entries of every layer; the others are residuals (LAGS-SGD).

    .. math::
        acc_t = \epsilon_{t-1} + \alpha_t G_t, \quad \epsilon_t = acc_t - TopK(acc_t, k), \quad
        g_t = \frac{1}{P} \sum_{p=1}^{P} TopK(acc^p_t, k^{(l)})

    for each layer l (parameter tensor) by itself, with k = max(1, floor(density * d)) on every
    rank. With a ``torch.optim.SGD`` given to ``replicate(optimizer=...)`` residuals
    :math:`\epsilon` are in units of learning rate times gradient and ``.grad`` becomes
    :math:`g_t / \alpha_t`; with another optimizer, or none, :math:`\alpha_t = 1`. ``units``
    ("lr" or "gradient") overrides that. A layer that costs no less sparse than dense (about
    where k >= d / P) is sent whole.

    ``density`` may differ by layer: a mapping from names or patterns of names (of :mod:`fnmatch`;
    of several that match, a name, or else the first one) to numbers that covers all parameters, or
    a function of name and number of entries that returns the same numbers on all ranks.

    ``selection`` is how entries are found: "sampled" and "exact" find the same, and a callable
    ``select(x, k)`` of your own, equal on all ranks, returns the indices (k,) of any k entries of
    a flat tensor. ``scope="model"`` chooses among all entries of the model at once, after backward
    (SLGS-SGD). ``over="local"`` exchanges inside nodes only. ``broadcast_buffers``: as of Mean.

    Of deep gradient compression: ``momentum`` is momentum correction, which adds the velocity u = m
    u + G to the residual instead of G. ``masking`` sets the velocity to zero where an entry is sent
    (momentum factor masking), except in layers that are sent whole. It is off by default: the
    benchmark ``lags/correction`` compares both. ``warmup`` is the number of steps in which the
    density falls from 1/4 to its value. ``clip_norm`` shortens each layer's share in the mean,
    :math:`G^p / P`, to the norm clip_norm / sqrt(P) before anything else: the sum of P independent
    shares of that norm has about the norm clip_norm. It is the norm of one layer, since that of all
    is known only after backward. Clipping ``.grad`` after backward limits what arrives at once, of
    which most is older than the step, and leaves an outlier in the residual of its rank.

    Of a model that FSDP2 shards, a layer is this rank's shard of a parameter, P the number of nodes
    and :math:`G^p` the mean gradient of node p. Each rank chooses k entries of its shard, which are
    the same k on its counterparts; a shard without entries sends nothing. ``scope="model"`` chooses
    among the shards of a rank. Of a sparse gradient all rows are sent, without a residual.

    A gradient that is discarded trains nothing later: residuals and velocities return to what they
    were before its backward. Discarded is what was cleared, replaced or changed in ``.grad`` before
    a ``torch.optim.Optimizer`` that holds the parameter has stepped (or, where none ever does,
    before the parameter was changed in place), also if the script has copied it before. In a loop
    that never steps in one of these ways, ``replica.step()`` says that gradients were used.

    ``wire="bf16"`` or "fp16" sends the values of sparse messages in 16 bits. All ranks use the
    rounded values, and what rounding takes stays in the residual. "fp16" scales each message by a
    power of two, so that nothing overflows. Layers sent whole keep their precision.

    ``measure=True`` times backwards 2 to 6, and again every ``retune`` steps, as "adaptive" always
    does: ``stats()["lags"]`` then has S_max, the bound of eq. 19 on the speed-up of overlap over
    SLGS-SGD, and the share of it that is reached. On an accelerator those backwards synchronize
    with the host layer by layer, and six small all-gathers follow.

    Bytes sent per step: (P-1) * 8 k for float32, (P-1) * 6 k with ``wire``, and 4 for each
    parameter. Extra memory: three models (residuals twice, and what ``.grad`` becomes), 2 P density
    models of messages, and two more with momentum; once several backwards exchange before a
    gradient is used, two more, and one for momentum; one copy of the gradients while backward
    runs. Passes over memory: add, one reading pass to choose (two without numba), zero, and the k
    entries of each rank; two more with clip_norm. If any rank has a gradient that is not finite,
    all ranks' residuals stay as before this backward and every ``.grad`` becomes NaN; the ranks of
    a node with a sharded model agree on that in one message of 80 bytes.

    Source: Shi et al. 2020, Algorithm 1 and section 5; Lin et al. 2018, section 3.
    """

    density: (
        Annotated[float, between(0, 1, closed="right")]
        | Literal["adaptive"]
        | Mapping[str, float]
        | OfLayer
    ) = 0.001
    selection: Literal["sampled", "exact"] | Select = "sampled"
    momentum: Annotated[float, between(0, 1, closed="left")] = 0.0
    masking: bool = False
    clip_norm: Annotated[float, above(0)] | Annotated[None, "no clipping"] = None
    warmup: Annotated[int, at_least(1, "steps")] | None = None
    wire: Sixteen | Annotated[None, "full precision"] = None
    message_mb: Annotated[float, above(0, "MiB")] = 1 / 16
    scope: Literal["layer", "model"] = "layer"
    units: Literal["lr", "gradient"] | None = None
    max_ratio: Annotated[float, at_least(1)] = 1000.0
    retune: Annotated[int, at_least(WATCHED + 1, "steps")] = 1000
    measure: bool = False
    over: Literal["world", "local"] = "world"
    broadcast_buffers: bool = field(default=False, repr=False)
    is_healable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(self)
        if isinstance(self.density, Mapping) and (fault := mapping_fault(self.density)):
            raise ValueError(fault)
        if self.scope == "model" and not isinstance(self.density, float | int):
            raise ValueError(
                f"density={self.density!r} with scope='model', which chooses among the entries of "
                "all layers; give a number, or leave scope='layer'"
            )
        if self.density == "adaptive" and self.warmup is not None:
            raise ValueError(
                "density='adaptive' chooses from the first steps on; leave warmup=None, or give a "
                "number"
            )
        if self.masking and not self.momentum:
            raise ValueError(
                "masking=True with momentum=0.0: without momentum correction there is no velocity "
                "to mask; set momentum, or leave masking at False"
            )

    def __repr__(self) -> str:
        return describe(self)

    @property
    def takes_sparse(self) -> bool:
        """Whether gradients may be sparse; velocities and measured ratios are of whole layers."""
        return not (self.momentum or self.measure or self.density == "adaptive")

    @property
    def on_loss(self) -> OnLoss | None:
        """Messages are made again; what ranks have measured together holds for these alone."""
        return None if self.measure or self.density == "adaptive" else "again"

    def fault(
        self, parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
    ) -> str | None:
        """Return what makes the given optimizers or the densities unfit, or None."""
        try:
            self.densities_of(parameters)
        except ValueError as error:
            return str(error)
        return optimizer_fault(parameters, optimizers, self.units, self.momentum)

    def resolved(self, parameters: Mapping[str, Tensor]) -> Mapping[str, object]:
        """Return the densities that a function has given."""
        if not callable(self.density):
            return {}
        return {f"density of {name}": d for name, d in self.densities_of(parameters).items()}

    def peers(self, site: Site) -> Collection[int] | None:
        """Return none: entries are gathered; any for 16-bit means of layers sent whole."""
        return peers_of_mean(site.parameters.values())

    def bind(self, site: Site) -> "BoundTopK":
        """Build the messages."""
        units = Units.of(site.registered, site.optimizers, site.scaler, self.units)
        bound = BoundTopK(site, self, units=units, densities=self.densities_of(site.registered))
        bound.build()
        return bound

    def remarks(self, site: Site) -> list[str]:
        """Return what follows from an optimizer or a scaler that was not given."""
        notes = []
        if not site.optimizers and self.units is None:
            notes.append(
                "no optimizer= was given: residuals are in units of the gradient; with "
                "torch.optim.SGD pass it, and they are in units of learning rate times gradient"
            )
        if site.scaler is None:
            notes.append(
                "no scaler= was given: with a GradScaler pass it, or residuals mix gradients of "
                "different loss scales"
            )
        return notes

    def densities_of(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the density of every layer; adaptive ones begin at the lowest."""
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        first = 1 / self.max_ratio if isinstance(self.density, str) else self.density
        return layer_densities(first, sizes)

    def select_on(self, device: torch.device) -> BlockSelect:
        """Return how entries are found in the blocks of a flat tensor on ``device``."""
        if callable(self.selection):
            return each_block(self.selection)
        return top_k_of_blocks(device, exact=self.selection == "exact")

    def plan_of(self, site: Site, exchanges: int, densities: Mapping[str, float]) -> MessagePlan:
        """Return what fixes the messages after so many exchanges."""
        if (warmup := self.warmup) is not None and exchanges < warmup:
            densities = {n: warm_density(d, exchanges, warmup) for n, d in densities.items()}
        return MessagePlan(site, densities, self.message_mb, self.wire, self.scope == "model")


@final
@dataclass(eq=False)
class BoundTopK(ErrorFeedback):
    """:class:`TopK` on one replica; residuals and velocities are in the messages."""

    settings: TopK
    densities: Mapping[str, float] = field(kw_only=True)  # before warm-up
    plan: MessagePlan = field(init=False)  # from which the messages were made
    exchanges: int = 0  # steps with an exchange
    has_exchanged: bool = False  # whether this is one
    timer: LayerTimer | None = None  # while backwards are measured
    times: LayerTimes | None = None  # what the last measurement has found

    def state(self) -> Iterator[Variable]:
        """Yield what fixes the messages, and residuals and velocities of this rank by name."""
        yield from super().state()
        yield plain("shared", self, "exchanges", count_fault)
        yield Variable(
            "densities",
            "shared",
            lambda: dict(self.densities) if self.settings.density == "adaptive" else {},
            lambda saved: setattr(self, "densities", {**self.densities, **saved}),
            densities_fault,
            is_compared=True,
        )
        momentum = self.settings.momentum
        yield Variable("residual", "own", lambda: self.kept("residual"))
        yield Variable("velocity", "own", lambda: self.kept("velocity") if momentum else {})

    def load(self, saved: Saved) -> None:
        """Restore what :meth:`save` returned; the next step is a new one."""
        super().load(saved)
        self.has_exchanged = False

    def build(self) -> None:
        """Build the messages of the present densities."""
        self.plan = self._new_plan()
        super().build()

    def new_messages(self) -> list[FeedbackMessage]:
        """Return the messages of the plan."""
        settings, given = self.settings, (self.site, self.group, self.units)
        # In deep gradient compression a rank's gradient is its share, already divided by P.
        limit = settings.clip_norm and settings.clip_norm * self.site.size**0.5
        correction = Correction(settings.momentum, settings.masking, limit)
        select = settings.select_on(self._device)
        dense, sparse = self.plan.dense(self.order), self.plan.sparse(self.order)

        def clipped(name: str, values: Tensor) -> Tensor:
            return correction.clipped(values, self.units.scales[name].loss)

        return [
            *(DenseMessage(*given, names, correction) for names in dense),
            *(SparseMessage(*given, b, correction, select, settings.wire) for b in sparse),
            *([Rows(self.site, self.group, correct=clipped)] if self.site.sparse else ()),
        ]

    def add(self, name: str) -> None:
        """Add a gradient to its message; note when, while times are measured."""
        if self.timer is None:
            return super().add(name)
        self.timer.enter(name)
        super().add(name)
        self.timer.added(name)

    def launch(self) -> None:
        """Launch the next message; note when, while times are measured."""
        super().launch()
        if self.timer is not None:
            names = self.messages[self.launched - 1].names
            self.timer.launched({name: self.site.parameters[name].numel() for name in names})

    def finish(self) -> None:
        """Complete the exchange of a backward, and count the steps that have one."""
        super().finish()
        if self.timer is not None:
            self.timer.finish()
        if not self.has_exchanged:
            self.exchanges, self.has_exchanged = self.exchanges + 1, True
            if self.settings.measure or self.settings.density == "adaptive":
                self._watch()

    def missed(self) -> None:
        """Keep what was not sent, and count the exchange."""
        super().missed()
        self.exchanges += not self.has_exchanged

    def stepped(self) -> None:
        """Begin a step; build new messages if the densities are others now."""
        self.has_exchanged = False
        self.is_current &= self._new_plan() == self.plan
        super().stepped()

    def stats(self) -> Saved:
        """Return the ratios c of all layers, and what the last measurement found.

        ``c_max`` is the largest ratio, with which the bound on convergence grows (eq. 17).
        """
        ratios = {name: 1 / self.plan.density_of(name) for name in self.order}
        found = {"c": ratios, "c_max": max(ratios.values()), "messages": len(self.messages)}
        if self.times is not None:
            seconds = sum(message.seconds(self.times.link) for message in self.messages)
            found |= self.times.summary(seconds, self.waited)
        return {"lags": found}

    def _watch(self) -> None:
        """Measure some backwards, periodically; choose ratios that suit them, if adaptive."""
        phase = (self.exchanges - 1) % self.settings.retune
        if phase == 0:
            self.timer = LayerTimer(self._device)
        elif phase == WATCHED and self.timer is not None:
            self.times = average_times(self.timer, self.order, self.group)
            self.timer = None
            if self.settings.density != "adaptive":
                return
            most = self.settings.message_mb * 2**20
            given = self.settings.max_ratio, most, self.settings.wire
            ratios = self.times.ratios(self.site.parameters, *given)
            self.densities = {name: 1 / ratio for name, ratio in ratios.items()}

    def _new_plan(self) -> MessagePlan:
        return self.settings.plan_of(self.site, self.exchanges, self.densities)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.site.parameters.values())).device
